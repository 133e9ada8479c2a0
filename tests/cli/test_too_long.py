"""A text or a length that a model has no positions for is refused before its weights are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from gguf_model import tiny, write
from kvthaw.errors import ConfigError
from kvthaw.serve.build import build
from said import Said, refused


@pytest.fixture
def file(tmp_path: Path) -> Path:
    pytest.importorskip("gguf")
    write(tmp_path / "tiny.gguf", tiny())
    return tmp_path / "tiny.gguf"


@pytest.fixture(params=["folder", "gguf"])
def unread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a model whose weights nothing may read."""
    where = request.getfixturevalue("model" if request.param == "folder" else "file")

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", read)
    return str(where)


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--file"),
        ("generate", "--question", "Why?", "--file"),
        ("chat", "--file"),
        ("serve", "--port", "0", "--context"),
    ],
)
def test_a_long_text_is_refused_before_weights_are_read(unread: str, command: tuple[str, ...], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The grass is green. " * 500)
    said = Said(*command, str(text), "--model", unread, columns=1000)
    refused(said, 1, " tokens, 10,000 characters; the model's positions end at ", "--rope-scaling yarn:", "--cut")


def test_a_request_longer_than_the_positions_is_refused_before_weights_are_read(unread: str) -> None:
    with pytest.raises(ConfigError, match=r"max_len is 9,000; the model's positions end at .*: rope_scaling gives it more"):
        build(unread, max_len=9000)
    with pytest.raises(ConfigError, match=r"context 'a' has about \d+ tokens; a request has at most 40: raise max_len"):
        build(unread, max_len=40, contexts={"a": "the " * 55})
