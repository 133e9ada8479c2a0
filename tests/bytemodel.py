"""A tiny Llama whose tokens are bytes, saved as a folder: what the command line and the runner load in tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from zoo import sharpen

POSITIONS = 2048


def save(folder: Path, *, ends: bool = True, layers: int = 2) -> Path:
    """Write model and tokenizer; returns the folder. Token 256 begins every prompt, 257 ends a generation, if one shall end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>" if ends else None).save_pretrained(
        folder
    )
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        bos_token_id=256,
        eos_token_id=257 if ends else None,
    )
    sharpen(LlamaForCausalLM(config), seed=3).save_pretrained(folder)
    return folder
