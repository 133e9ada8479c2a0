"""A tiny model of the llama architecture in a .gguf file."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "th", "the", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny() -> LlamaForCausalLM:
    """Return a model of random weights."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=512, tie_word_embeddings=False, rms_norm_eps=1e-5, **shape)
    ).eval()


def write(path: Path, model: LlamaForCausalLM, *, leave_out: str = "", parts: int = 1) -> None:
    """Write a model and a tokenizer of characters as llama.cpp does."""
    import gguf

    config, out = model.config, gguf.GGUFWriter(path, "llama")
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(WORDS)
    out.add_token_types([3 if word == "<|end|>" else 1 for word in WORDS])
    out.add_token_merges(["t h", "th e"])
    out.add_bos_token_id(len(WORDS) - 1)
    out.add_eos_token_id(len(WORDS) - 1)
    out.add_chat_template(TEMPLATE)
    if parts > 1:
        out.add_uint16("split.count", parts)
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate"}
    names |= {
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    names |= {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        where = name.split(".")
        block = f"blk.{where[2]}." if where[1] == "layers" else ""
        kept = f"{block}{names[where[-2]]}.weight"
        if where[-2] in heads:  # llama.cpp turns neighbouring dimensions
            n = heads[where[-2]]
            weight = weight.reshape(n, 2, weight.shape[0] // n // 2, -1).transpose(1, 2).reshape(weight.shape)
        if kept != leave_out:
            out.add_tensor(kept, weight.numpy().copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
