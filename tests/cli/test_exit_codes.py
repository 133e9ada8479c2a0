"""What is refused, with one readable line, and what is stopped."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import forked
from said import Said, refused


def test_errors_are_one_line_and_exit_code_1(model: str, tmp_path: Path) -> None:
    generate = ("generate", "Hello", "--model", model)
    refused(Said(*generate, "--method", "icecahe"), 1, "icecahe", "did you mean 'icecache'?")
    refused(Said(*generate, "--method", "oracle", "--budget", "8"), 1, "budget is 8", "16")
    refused(Said(*generate, "--budget", "64", "--retrieved", "8"), 1, "give one of them")
    refused(Said(*generate, "--device", "abacus"), 1, "device is 'abacus'")
    refused(Said(*generate, "--dtype", "int3"), 1, "dtype is 'int3'", "bfloat16")
    refused(Said("generate", "Hello", "--model", "./nowhere"), 1, "'./nowhere'", "no such folder")
    refused(Said("generate", "Hello", "--model", str(tmp_path)), 1, "no config.json")
    refused(Said("generate", "", "--model", model), 1, "the prompt is empty")
    refused(Said("generate", "--model", model, stdin="  \n"), 1, "stdin is empty")
    refused(Said("generate", "a" * 3000, "--model", model), 1, "3,000 tokens", "2,048")
    refused(Said("eval", "passkey", "--model", model, "--length", "10"), 1, "length 10 is too short")
    refused(Said("eval", "passkey", "--model", model, "--method", "orakle"), 1, "oracle")
    refused(
        Said("eval", "passkey", "--method", "icecache-digest:page=4"), 1, "icecache-digest has no option 'page'", "page_size"
    )
    refused(Said("eval", "passkeyy"), 2, "did you mean 'passkey'?")
    refused(Said("eval", "passkey", "--model", model, "--out", "/nowhere/x", "--length", "300"), 1, "/nowhere/x")
    refused(Said("eval", "passkey", "--question", "both"), 2, "'both'")
    refused(Said("demo", "--model", model, "--length", "100"), 1, "length is 100")
    for command in (("eval", "perplexity"), ("eval", "passkey")):
        refused(Said(*command, "--plot", "plot.txt"), 1, "plot is 'plot.txt'", ".png")
        refused(Said(*command, "--plot", "/nowhere/plot.png"), 1, "'/nowhere/plot.png'", "folder does not exist")
        refused(Said(*command, "--out", "/nowhere/x"), 1, "/nowhere/x", "folder does not exist")
    refused(Said("eval", "passkey", "--method", "quest,clusterkv:distance=ip"), 1, "distance is 'ip'", "cosine, l2, inner")
    refused(Said("eval", "passkey", "--model", model, "--method", "pariskv:beta=2.0"), 1, "beta is 2.0")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    refused(Said("generate", "--file", str(latin), "--model", model), 1, "latin.txt is not UTF-8", "byte 3")
    refused(Said("generate", "--model", model, stdin=latin.read_bytes()), 1, "stdin is not UTF-8", "byte 3")
    refused(Said("generate", "caf\udce9", "--model", model), 1, "the prompt is not UTF-8", "byte 3")
    blank = tmp_path / "blank.txt"
    blank.write_text(" \n")
    refused(Said("chat", "--file", str(blank), "--model", model), 1, "blank.txt is empty")
    refused(Said("compare", "--method", "al"), 1, "did you mean 'all'?")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "qwen3"}')
    refused(Said("generate", "Hello", "--model", str(bare)), 1, "bare", "no tokenizer")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    refused(Said("generate", "Hello", "--model", str(broken)), 1, "could not be loaded")


@pytest.mark.parametrize("bytes_left", [100, 5000])
def test_damaged_weights_are_told_in_one_line(folder: Path, tmp_path: Path, bytes_left: int) -> None:
    shutil.copytree(folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:bytes_left])
    refused(Said("generate", "Hello", "--model", str(tmp_path / "model")), 1, "could not be loaded", "damaged")


def test_wrong_usage_is_exit_code_2(model: str) -> None:
    refused(Said("generate", "Hello", "--budget", "lots"), 2, "'lots'")
    refused(Said("generate", "Hello", "--file", "nowhere.txt"), 2, "nowhere.txt")
    refused(Said("generate", "Hello", "--max-new-tokens", "0"), 2, "max-new-tokens")
    refused(Said("eval", "passkeys"), 2, "'passkeys'", "variable_tracking")
    refused(Said("eval", "passkey", "--length", "4q"), 2, "'4q'")
    refused(Said("eval", "passkey", "--depths", ","), 2, "--depths")
    refused(Said("eval", "passkey", "--depths", "50,120"), 2, "--depths", "120", "between 0 and 100")
    refused(Said("eval", "perplexity", "--retrieved", "many"), 2, "'many'", "--retrieved")
    refused(Said("eval", "perplexity", "--text", "nowhere.txt"), 2, "nowhere.txt")
    refused(Said("thaw"), 2, "thaw")


def test_numbers_beyond_64_bits_are_one_clear_line(model: str) -> None:
    huge = "99999999999999999999999"
    generate = ("generate", "Hello", "--model", model)
    refused(Said(*generate, "--seed", huge), 2, "--seed", str((1 << 63) - 1))
    refused(Said(*generate, "--seed", str(1 << 63)), 2, "--seed")
    refused(Said(*generate, "--budget", huge), 2, "--budget", huge, "at most")
    refused(Said(*generate, "--retrieved", huge), 2, "--retrieved")
    refused(Said("eval", "passkey", "--model", model, "--budget", f"64,{huge}"), 2, "--budget", huge)
    refused(Said("compare", "--model", model, "--length", huge), 2, "--length", huge)
    refused(Said("demo", "--model", model, "--seed", f"-{huge}"), 2, "--seed")


def test_a_device_without_memory_is_refused(model: str) -> None:
    refused(Said("generate", "Hello", "--model", model, "--device", "meta"), 1, "device is 'meta'")


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    refused(Said("generate", "Hello", "--model", "nobody/nothing"), 1, "'nobody/nothing'", "cannot be reached")
    refused(Said("demo", "--model", "--help"), 1, "'--help'", "cannot be reached")


def test_a_results_file_with_a_bad_line_is_named(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = ("eval", "passkey", "--model", model, "--method", "streaming", "--length", "300", "--samples", "1")
    assert Said(*command, "--out", str(out)).code == 0
    out.write_bytes(out.read_bytes() + b'{"setting": "caf\xe9"}\n')
    refused(Said(*command, "--out", str(out)), 1, "out.jsonl", "line 3")
    (tmp_path / "results.jsonl").write_bytes(b"\xff\n")
    refused(Said("compare", "--report-only", "--out", str(tmp_path)), 1, "results.jsonl", "line 1")


def test_nan_in_the_keys_is_one_line(model: str, tmp_path: Path) -> None:
    import shutil

    from transformers import AutoModelForCausalLM

    folder = tmp_path / "nan"
    shutil.copytree(model, folder)
    llm = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        llm.model.layers[1].self_attn.k_proj.weight[0, 0] = torch.nan
    llm.save_pretrained(folder)
    said = Said("generate", "Hello " * 40, "--model", str(folder), "--method", "oracle", "--no-stream")
    refused(said, 1, "not finite in layer 1")


def test_a_gpu_without_memory_left_is_one_line(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 24 GiB.")

    monkeypatch.setattr("kvthaw.answering.prefill", fail)
    said = Said("generate", "Hello", "--model", model)
    refused(said, 1, "CUDA out of memory. Tried to allocate 448.00 MiB. Give a shorter text", "kvthaw plan")


def test_ctrl_c_is_exit_code_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvthaw.answering.prefill", stop)
    said = Said("generate", "Hello", "--model", model)
    assert (said.code, said.err.strip()) == (130, "kvthaw: stopped")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_a_real_ctrl_c_stops_a_running_command(endless: Path) -> None:
    generate = ("generate", "Hello", "--model", str(endless), "--method", "oracle", "--device", "cpu")
    with forked(*generate, "--max-new-tokens", "100000", "--temperature", "3") as command:
        command.stdout.read(1)  # it streams
        command.send(signal.SIGINT)
        err = command.stderr.read()
        assert command.wait() == 130, err
    assert "Traceback" not in err
    assert "kvthaw: stopped" in err
