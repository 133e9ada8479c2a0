"""Writes what Hugging Face needs beside the shards: config.json, generation_config.json and the shards' index.

python models/export.py --shards FOLDER [--out src/kvthaw/assets/model]
"""

import argparse
import json
import shutil
from pathlib import Path

from transformers import GenerationConfig, LlamaConfig

from llama import Shape

HERE = Path(__file__).parents[1]


def config(shape: Shape) -> LlamaConfig:
    """The shape as a LlamaConfig."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131072,
        rope_theta=shape.theta,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        rms_norm_eps=shape.eps,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        dtype="bfloat16",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "src" / "kvthaw" / "assets" / "model")
    args = parser.parse_args()
    weight_map = json.loads((args.shards / "weight_map.json").read_text())
    args.out.mkdir(parents=True, exist_ok=True)
    for old in args.out.glob("*.safetensors"):
        old.unlink()
    size = 0
    for name in sorted(set(weight_map.values())):
        shutil.copyfile(args.shards / name, args.out / name)
        (args.out / name).chmod(0o644)
        size += (args.out / name).stat().st_size
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (args.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config(Shape()).save_pretrained(args.out)
    GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1, do_sample=False).save_pretrained(args.out)
    print(f"{size / 1e6:.1f} MB in {len(set(weight_map.values()))} shards")


if __name__ == "__main__":
    main()
