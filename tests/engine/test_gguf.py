"""Models in .gguf files: weights, tokenizer and template come from the file, and what cannot be loaded is said in a sentence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_model import TEMPLATE, tiny, write
from kvthaw.engine import hub
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import load, load_config
from kvthaw.engine.hub import is_path
from kvthaw.errors import ConfigError

HAS_GGUF = importlib.util.find_spec("gguf") is not None
needs_gguf = pytest.mark.skipif(not HAS_GGUF, reason="gguf is not installed")


@needs_gguf
def test_a_file_is_the_model_it_was_written_from(tmp_path: Path) -> None:
    path, model = tmp_path / "tiny.gguf", tiny()
    write(path, model)
    loaded, tokenizer = load(str(path), device="cpu")
    assert loaded.dtype == torch.float32
    assert tokenizer.chat_template == TEMPLATE
    ids = tokenizer("the theme", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-5)
        cached = loaded(ids, past_key_values=Cache(loaded, "icecache-digest", budget=64)).logits
    assert torch.allclose(cached, expected, atol=1e-5)
    assert load_config(str(path)).num_hidden_layers == 2
    assert load(str(path), device="cpu", dtype="bfloat16")[0].dtype == torch.bfloat16


@needs_gguf
def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For config, tokenizer and weights; gguf is as it was afterwards, also behind an error."""
    import gguf

    parsed, plain = [], gguf.GGUFReader
    build = plain._build_fields

    def counted(self: Any, *given: Any) -> Any:
        parsed.append(self)
        return build(self, *given)

    monkeypatch.setattr(plain, "_build_fields", counted)
    path = tmp_path / "tiny.gguf"
    write(path, tiny())
    load(str(path), device="cpu")
    assert len(parsed) == 1
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(ConfigError):
        load(str(path), device="cpu")
    assert gguf.GGUFReader is plain


@needs_gguf
@pytest.mark.parametrize(
    ("how", "said"),
    [({"leave_out": "blk.1.ffn_up.weight"}, "lacks 1 weights"), ({"parts": 3}, "one of 3 parts")],
)
def test_part_of_a_model_is_not_filled_with_random_weights(tmp_path: Path, how: dict[str, Any], said: str) -> None:
    path = tmp_path / "part.gguf"
    write(path, tiny(), **how)
    with pytest.raises(ConfigError, match=said):
        load(str(path), device="cpu")


@needs_gguf
@pytest.mark.parametrize("kept", [4, 40, 600, 5000, -1000])
def test_a_file_that_was_cut_is_an_error_of_kvthaw(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "cut.gguf"
    write(path, tiny())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"could not be loaded: .*damaged, incomplete"):
        load(str(path), device="cpu")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    monkeypatch.setattr(hub, "find_spec", lambda name: None)
    for read in (load, load_config):
        with pytest.raises(ConfigError, match=r"tiny\.gguf'; a \.gguf file takes gguf and accelerate.*kvthaw\[gguf\]"):
            read(str(path))


def test_files_that_hold_no_model_and_folders_that_hold_one_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_bytes(b"not a model")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for name, said in (
        (tmp_path / "text.gguf", "not in the GGUF format"),
        (tmp_path / "model.safetensors", r"only \.gguf"),
        (tmp_path, r"no config\.json; name a file in it, such as text\.gguf"),
        (tmp_path / "none.gguf", "there is no such file"),
        (Path("none.gguf"), "there is no such file"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(str(name))
    assert is_path("none.gguf")
