"""Small tokenizers of the kinds that models have: bytes in GPT-2's letters, SentencePiece's with tokens for bytes, word pieces."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def byte_level() -> Any:
    """Every byte is a token; "h" and "e" are merged, and " " and "the"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("t", "he"), ("Ġ", "the")]
    vocab = {word: i for i, word in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _whole(tokenizer)


def sentencepiece(*, strips: bool) -> Any:
    """Letters, "the" with and without a space before it, and tokens for bytes. strips: as Llama 2's, which begins every text with a
    space that decoding takes off; else as Gemma's."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127)), "he", "the", "▁the"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("h", "e"), ("t", "he"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips else replace
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return _whole(tokenizer)


def metaspace() -> Any:
    """As T5's, which begins every text with a space that decoding takes off; letters without a token are unknown."""
    words = ["▁", *map(chr, range(33, 127)), "▁the", "▁king"]
    scored = [("<unk>", -20.0), *((word, -1.0 if len(word) > 2 else -9.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _whole(tokenizer)


def wordpiece() -> Any:
    """As BERT's: words apart by a space that no token has, and pieces that go on a word."""
    letters = [chr(i) for i in range(33, 127)]
    words = ["<unk>", *letters, *(f"##{letter}" for letter in letters), "the", "play", "##ing"]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    return _whole(tokenizer)


def _whole(tokenizer: Tokenizer) -> Any:
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )


KINDS = {
    "byte-level": byte_level,
    "llama": lambda: sentencepiece(strips=True),
    "gemma": lambda: sentencepiece(strips=False),
}
WORDS = KINDS | {"metaspace": metaspace, "wordpiece": wordpiece}
"""Those, and others that have no token for some letters."""
