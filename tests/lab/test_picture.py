"""The picture of a decode step."""

from __future__ import annotations

from lab.picture import OUT, numbers, picture, size


def test_the_picture_in_the_documents_is_what_the_script_draws() -> None:
    assert OUT.read_text(encoding="utf-8") == picture()


def test_sizes_are_those_of_the_model() -> None:
    sizes = {name: size(count) for name, count in numbers().items()}
    assert sizes == {
        "query": "8 KiB", "store": "16 GiB", "chosen": "118 MiB", "moved": "35 MiB", "means": "128 MiB", "index": "2.8 GiB"
    }  # fmt: skip
