"""kvthaw plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import T5Config

from said import Said, refused
from zoo import build

SHAPE = ("plan", "--shape", "llama-3.2-1b", "--method", "auto,full")
GPU = ("--gpu", "L4", "--host-memory", "64GB")


def test_json_has_the_bytes_of_every_method() -> None:
    (told,) = Said(*SHAPE, "--length", "64k", *GPU, "--json").records
    assert told["length"] == 65536
    assert told["weights"] == 2_471_628_800
    auto, full = told["forecasts"]
    assert (full["method"], full["in_force"], full["host_bytes"]) == ("full", "full", 0)
    assert full["needs"]["dense"] >= 65536 * 16 * 2 * 8 * 64 * 2
    assert auto["fits"]
    assert auto["basis"] == "estimated"
    assert auto["longest"] >= full["longest"] > 65536


def test_the_memory_of_a_card_is_what_it_is_sold_with() -> None:
    asked = ("plan", "--shape", "llama-3.1-8b", "--length", "128k", "--method", "auto", "--json")
    told = [
        Said(*asked, *card).records[0] for card in (("--gpu", "RTX-4090"), ("--gpu-memory", "24GB"), ("--gpu-memory", "24GiB"))
    ]
    known, sold, binary = (one["forecasts"][0] for one in told)
    assert known["fits"] is sold["fits"] is binary["fits"] is True
    assert known["in_force"] == sold["in_force"]
    assert sold == binary
    assert known["longest"] == pytest.approx(sold["longest"], rel=0.01)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("qwen3-8b --length 64k --gpu none", "for this length generate, chat and serve take --rope-scaling yarn:2."),
        ("qwen3-8b --length 64k --gpu H200", "for this length generate, chat and serve take --rope-scaling yarn:2."),
        ("qwen3-8b --length 8k --gpu H200", "for longer prompts generate, chat and serve take --rope-scaling yarn:FACTOR."),
        ("qwen3-8b --length 8k --gpu none", ""),
        ("tiny --length 64k --gpu none", ""),
    ],
)
def test_a_length_that_the_published_model_was_not_trained_for_is_told(asked: str, told: str) -> None:
    """The factor is the one for that length. On the H200 a longer prompt fits, which no one asked for."""
    said = Said("plan", "--method", "full", "--shape", *asked.split()).out
    assert [line for line in said.splitlines() if "--rope-scaling" in line] == [
        f"qwen3-8b was trained for 40,960 positions; {told}" for _ in [told] if told
    ]


def test_positions_are_scaled_as_the_other_commands_scale_them(tmp_path: Path) -> None:
    config = build("llama", max_position_embeddings=2048).config
    config.save_pretrained(tmp_path)
    asked = ("plan", "--model", str(tmp_path), "--length", "6000", "--gpu", "none", "--method", "full")
    refused(Said(*asked), 1, "6,000", "2,048", "--rope-scaling yarn:4")
    assert "6,000 tokens" in Said(*asked, "--rope-scaling", "yarn:4").out
    refused(Said(*SHAPE, "--rope-scaling", "yarn:4"), 1, "--rope-scaling", "--model")


def test_weights_that_exceed_the_card_leave_the_margin_as_it_is() -> None:
    said = Said("plan", "--shape", "llama-3.1-70b", "--length", "32k", "--gpu", "L4", "--method", "full").out
    assert "3.4 GiB" in said.partition("kept for activations")[2]
    assert "-" not in said.partition("kept for activations")[2].partition("there is")[0]


def test_tables_name_the_place_of_the_bytes() -> None:
    said = Said(*SHAPE, "--length", "262144", *GPU).out
    assert all(word in said for word in ("weights", "index", "rows", "NVIDIA L4", "longest prompt", "full", "estimated"))


def test_tables_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = Said("plan", "--shape", "llama-3.1-8b", "--length", "128k", *GPU, "--gpu-memory", "16GB").out
    table, _, words = said.partition("\nauto: ")
    assert max(map(len, table.splitlines())) <= 80
    assert table.count("clusterkv-plus") == 1, "in one part"
    assert "What would fit: " in words


def test_a_column_is_shown_where_it_has_something(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("plan", "--shape", "llama-3.1-8b", "--length", "128k")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "ms/token" not in Said(*asked, "--gpu-memory", "24GB").out
    assert "ms/token" in Said(*asked, "--gpu", "RTX-4090").out


def test_what_rows_are_stored_in_matters_only_where_rows_are_stored() -> None:
    said = Said("plan", "--shape", "tiny", "--gpu", "none", "--method", "full,quest", "--kv-dtype", "fp8").out
    assert "--kv-dtype fp8 changes nothing here for full:" in said
    assert (
        "changes nothing" not in Said("plan", "--shape", "tiny", "--gpu", "none", "--method", "quest", "--kv-dtype", "fp8").out
    )
    refused(Said("plan", "--shape", "tiny", "--gpu", "none", "--method", "full:kv_dtype=fp8"), 1, "kv_dtype", "full")


def test_a_folder_needs_no_weights(tmp_path: Path) -> None:
    build("gemma3").config.save_pretrained(tmp_path)
    (told,) = Said("plan", "--model", str(tmp_path), "--length", "300", "--new-tokens", "20", "--gpu", "none", "--json").records
    assert [one["method"] for one in told["forecasts"]][:2] == ["auto", "full"]
    assert told["forecasts"][0]["needs"]["windows"]
    assert told["forecasts"][0]["fits"] is None
    (told,) = Said("plan", "--model", str(tmp_path), "--gpu", "none", "--method", "full", "--json").records
    assert told["length"] + told["new_tokens"] == build("gemma3").config.max_position_embeddings


def test_a_model_that_decodes_nothing_is_refused_by_name(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    refused(Said("plan", "--model", str(tmp_path)), 1, "T5Config")


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        (("--shape", "llama"), 1, ("shape", "'llama'", "llama-3.1-8b")),
        (("--shape", "tiny", "--method", "parisk"), 1, ("method", "'pariskv'")),
        (("--shape", "tiny", "--gpu", "H10"), 1, ("gpu", "'H100'")),
        (("--shape", "tiny", "--gpu-memory", "24XB"), 1, ("--gpu-memory", "24XB", "8GiB")),
        (("--shape", "tiny", "--gpu", "none", "--gpu-memory", "24GB"), 1, ("--gpu-memory",)),
        (("--shape", "tiny", "--gpu-memory", "24"), 1, ("--gpu-memory", "24 bytes", "24GB")),
        (("--shape", "tiny", "--host-memory", "64"), 1, ("--host-memory", "64 bytes")),
        (("--shape", "tiny", "--length", "1m"), 2, ("--length", "1m")),
        (("--shape", "tiny", "--model", "shipped"), 2, ("--model", "--shape")),
        (("--model", "./nothing-here"), 1, ("./nothing-here",)),
    ],
    ids=str,
)
def test_what_cannot_be_is_told_in_a_line(given: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    refused(Said("plan", *given), code, *words)
