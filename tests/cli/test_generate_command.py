"""kvthaw generate."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bytemodel import POSITIONS
from said import Said, refused


def test_generate_from_argument_file_and_stdin(model: str, tmp_path: Path) -> None:
    text = "The grass is green. " * 20
    path = tmp_path / "prompt [draft].txt"  # brackets are no markup
    path.write_text(text)
    common = ("--model", model, "--method", "oracle", "--budget", "64", "--max-new-tokens", "6")
    streamed = Said("generate", text, *common)
    assert streamed.code == 0
    assert streamed.out.strip()
    assert re.search(r"oracle: each step read \d\d of 40\d tokens\.", streamed.err)
    assert re.search(r"First token after .* \(prompt: 400 tokens, [\d,]+ per second\), then .* per token", streamed.err)
    assert "KV: " not in streamed.err
    assert re.search(r"KV: .* on the device, .* on the host", Said("generate", text, *common, "-v").err)
    assert streamed.out == Said("generate", "--file", str(path), *common, "--no-stream").out
    assert streamed.out == Said("generate", *common, stdin=text).out
    record = Said("generate", text, *common, "--json").records[0]
    assert record["text"] + "\n" == streamed.out
    assert f"--file {path} reads it" in Said("generate", str(path), *common).err
    assert record["prompt_tokens"] == len(text)
    assert record["new_tokens"] == 6
    assert record["finish"] == "length"
    assert record["sparse_steps"] == 2 * 5
    assert record["attended_max"] <= record["budget"] == 64
    assert record["ttft_s"] < record["tt2t_s"]


def test_several_methods_and_budgets_answer_side_by_side(model: str, tmp_path: Path) -> None:
    """Each as it does alone."""
    path = tmp_path / "text.txt"
    path.write_text("The grass is green and the sky is blue today. " * 8)
    common = ("generate", "--model", model, "--file", str(path), "--question", "Why?", "--question", "Who?")
    common = (*common, "--max-new-tokens", "4", "--json")
    found = Said(*common, "--method", "full,quest", "--budget", "48,96").records
    labels = [(one["question"], one["variant"]) for one in found]
    assert labels == [(ask, way) for ask in ("Why?", "Who?") for way in ("full", "quest, budget 48", "quest, budget 96")]
    for name, *limits in (("full",), ("quest", "--budget", "48"), ("quest", "--budget", "96")):
        alone = Said(*common, "--method", name, *limits).records
        label = ", budget ".join([name, *limits[1:]])
        assert [one["text"] for one in found if one["variant"] == label] == [one["text"] for one in alone], label
    said = Said(*common[:-1], "--method", "full,quest", "--budget", "48")
    assert [line.partition(":")[0] for line in said.out.splitlines() if not line.startswith(">")] == [
        "full",
        "quest, budget 48",
    ] * 2
    assert said.err.count("on the host.") == 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--method", "auto,full"), "auto chooses one method"),
        (("--method", "full,quest", "--kv", "kept"), "one method and one budget"),
        (("--budget", "64,128"), "auto chooses one method"),
    ],
    ids=str,
)
def test_what_cannot_stand_side_by_side_is_refused(asked: tuple[str, ...], words: str) -> None:
    refused(Said("generate", "Hello", "--model", "shipped", *asked), 1, words)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--method", "auto"), "Every step read all 44 tokens: full attention is faster up to 8,192 tokens"),
        (("--method", "auto"), "--method icecache-digest recalls instead"),
        (("--method", "full"), "Every step read all 44 tokens."),
        (
            ("--method", "quest", "--budget", "256"),
            "there was nothing to choose, the budget of 256 has room for all 44 tokens.",
        ),
    ],
    ids=str,
)
def test_generate_says_why_nothing_was_recalled(model: str, asked: tuple[str, ...], words: str) -> None:
    said = Said("generate", "The grass is green. " * 2, "--model", model, "--max-new-tokens", "5", *asked)
    assert words in said.err
    assert " - " not in said.err


def test_a_chat_template_that_is_not_used_is_told(model: str, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    asked = ("generate", "The grass is green. ", "--model", model, "--max-new-tokens", "2")
    template = ("--chat-template", str(tmp_path / "template.jinja"))
    refused(Said("generate", "x" * POSITIONS, *asked[2:], "--question", "Who?", *template), 1, "the prompt has")
    assert "has a chat template, which --chat uses" in Said(*asked, *template).err
    assert all(
        "has a chat template" not in Said(*asked, *how).err for how in ((), (*template, "--no-chat"), (*template, "--chat"))
    )


def test_a_question_goes_through_the_template_that_there_is(model: str, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{% for m in messages %}[user]{{ m['content'] }}[end]{% endfor %}")
    (tmp_path / "text.txt").write_text("The grass is green. ")
    asked = ("generate", "--file", str(tmp_path / "text.txt"), "--question", "Why?", "--model", model, "--max-new-tokens", "3")
    template = (*asked, "--chat-template", str(tmp_path / "template.jinja"))
    by_itself = Said(*template)
    assert by_itself.out == Said(*template, "--chat").out
    assert "asking through the model's chat template; --no-chat" in by_itself.err
    lengths = [Said(*one, "--json").records[0]["prompt_tokens"] for one in (template, (*template, "--no-chat"), asked)]
    assert lengths[0] == lengths[1] + len("[user][end]")
    assert lengths[1] == lengths[2]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"%PDF-1.7 all of it ASCII", ("a PDF", "pdftotext")),
        (b"PK\x03\x04 word/document.xml", (".docx", "pandoc")),
        (b"\x1f\x8b\x08", ("gunzip",)),
        ("naïve".encode("latin1") * 9, ("not UTF-8", "iconv")),
    ],
    ids=str,
)
def test_a_file_that_is_no_text_says_what_it_is(model: str, tmp_path: Path, data: bytes, words: tuple[str, ...]) -> None:
    (tmp_path / "text").write_bytes(data)
    refused(Said("generate", "--model", model, "--file", str(tmp_path / "text")), 1, str(tmp_path / "text"), *words)


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16"])
def test_marks_of_byte_order_are_no_text(model: str, tmp_path: Path, coding: str) -> None:
    (tmp_path / "text").write_bytes("The grass is green.".encode(coding))
    said = Said("generate", "--model", model, "--file", str(tmp_path / "text"), "--max-new-tokens", "2", "--json")
    assert said.records[0]["prompt_tokens"] == 19


def test_generate_takes_fractions_and_retrieved(model: str) -> None:
    text = "The grass is green. " * 20
    common = ("--model", model, "--method", "oracle", "--max-new-tokens", "4", "--json")
    assert Said("generate", text, *common, "--budget", "0.25").records[0]["budget"] == 100
    record = Said("generate", text, *common, "--retrieved", "10", "--dense-layers", "1").records[0]
    assert (record["retrieved"], record["dense_layers"]) == (10, 1)


def test_generate_keeps_the_kv_of_a_prompt(model: str, tmp_path: Path) -> None:
    """A longer prompt and the same one are continued from what is kept; a damaged folder is said to be, and made again."""
    text, folder = "The grass is green. " * 20, tmp_path / "kept"
    common = ("--model", model, "--method", "oracle", "--budget", "64", "--max-new-tokens", "6", "--json")
    plain = [Said("generate", prompt, *common).records[0] for prompt in (text, text + "The sky is")]
    first, again, longer = (
        Said("generate", prompt, *common, "--kv", str(folder)).records[0] for prompt in (text, text, text + "The sky is")
    )
    assert [each["kept_tokens"] for each in (first, again, longer)] == [0, len(text) - 1, len(text)]
    assert [each["text"] for each in (first, again, longer)] == [plain[0]["text"], plain[0]["text"], plain[1]["text"]]
    (folder / "header.json").write_text("{}")
    damaged = Said("generate", text, *common, "--kv", str(folder))
    assert "damaged" in damaged.err
    assert damaged.records[0]["kept_tokens"] == 0
    assert Said("generate", text, *common, "--kv", str(folder)).records[0]["kept_tokens"] == len(text) - 1


@pytest.mark.parametrize("method", ["oracle", "streaming"])
def test_several_questions_of_one_prompt(model: str, tmp_path: Path, method: str) -> None:
    """The prompt is prefilled once; each answer is that to a question alone."""
    text = "The grass is green. The sky is blue." * 10
    common = ("--model", model, "--method", method, "--budget", "64", "--max-new-tokens", "5")
    asked = ("Who?", "Why?", "When?")
    both = Said("generate", text, *common, *(part for one in asked for part in ("--question", one)), "--json").records
    alone = [Said("generate", f"{text}\n{one}", *common, "--json").records[0] for one in asked]
    assert [one["text"] for one in both] == [one["text"] for one in alone]
    assert [one["question"] for one in both] == list(asked)
    assert [one["kept_tokens"] for one in both] == [0, len(text), len(text)]
    if method == "oracle":
        plain = Said("generate", text, *common, "--question", "Who?", "--question", "Why?")
        assert plain.out == f"> Who?\n{alone[0]['text']}\n> Why?\n{alone[1]['text']}\n"
        kv = ("--kv", str(tmp_path / "kept"), "--question", "Who?", "--json")
        kept = [Said("generate", text, *common, *kv).records[0] for _ in range(2)]
        assert [one["kept_tokens"] for one in kept] == [0, len(text) - 1], "the question is not kept"


def test_what_was_kept_on_another_day_is_gone_on_from(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a chat template says the date; another document has today's."""
    (tmp_path / "t.jinja").write_text(
        "Today is {{ strftime_now('%d %B %Y') }}.{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    )
    text, kept = "The grass is green. The sky is blue. " * 10, list[int]()
    common = ("--model", model, "--method", "full", "--max-new-tokens", "2", "--json", "--chat")
    common += ("--chat-template", str(tmp_path / "t.jinja"), "--kv", str(tmp_path / "kv"))
    for month, document in ((1, text), (5, text), (9, text), (9, text.upper())):

        class Then(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime(2026, month, 1, tzinfo=tz)  # noqa: B023

        monkeypatch.setattr("kvthaw.engine.chat_template.datetime", Then)
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Then)
        kept += [Said("generate", document, *common, "--question", "Who?").records[0]["kept_tokens"]]
    held = len(f"Today is 01 January 2026.[user]{text.rstrip()}")
    assert kept[0] == 0
    assert held - 2 <= kept[1] == kept[2]
    assert kept[3] < 40


def test_generate_through_a_chat_template(model: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]")
    common = ("--model", model, "--method", "full", "--max-new-tokens", "5", "--json")
    chat = Said("generate", "Hello", *common, "--chat-template", str(template), "--system", "Be brief.").records[0]
    assert chat["text"] == Said("generate", "[system]Be brief.[user]Hello[assistant]", *common).records[0]["text"]


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "Hello", "--chat"),
        ("generate", "Hello", "--system", "Be brief."),
        ("chat", "--system", "Be brief."),
        ("chat", "--no-thinking"),
        ("inspect", "--file", __file__, "--question", "What?", "--out", "DATA", "--chat"),
        ("eval", "passkey", "--length", "256", "--chat"),
        ("eval", "gsm8k", "--data", "DATA", "--chat"),
    ],
)
def test_a_missing_chat_template_is_said_before_weights_are_read(
    command: tuple[str, ...], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    given = [str(tmp_path / "data.jsonl") if word == "DATA" else word for word in command]
    refused(Said(*given, "--model", model), 1, "chat template")


def test_generate_samples_as_it_is_told(model: str) -> None:
    def text(*arguments: str) -> str:
        common = ("--model", model, "--method", "full", "--max-new-tokens", "12", "--seed", "3", "--json")
        return str(Said("generate", "Hello there", *common, *arguments).records[0]["text"])

    greedy = text()
    assert text("--temperature", "2") == text("--temperature", "2") != greedy
    assert text("--temperature", "2") != text("--temperature", "2", "--seed", "4")
    assert text("--temperature", "2", "--top-p", "0.001") == text("--temperature", "2", "--top-k", "1") == greedy
    assert text("--temperature", "2", "--min-p", "1") == greedy
    assert text("--repetition-penalty", "50") != greedy
    assert text("--stop", greedy[3]) == greedy[: greedy.index(greedy[3])]
    assert text("--prefill-chunk", "4") == greedy
    refused(Said("generate", "Hello", "--model", model, "--top-p", "1.5"), 1, "top_p is 1.5")


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pariskv", "icecache-digest", "full"])
def test_generate_replays_graphs_on_a_gpu(model: str, method: str) -> None:
    text = "The grass is green. The sky is blue. " * 20
    common = (
        "--model",
        model,
        "--method",
        method,
        "--max-new-tokens",
        "24",
        "--device",
        "cuda",
        "--dtype",
        "float32",
        "--json",
    )
    assert Said("generate", text, *common).records[0]["captures"] > 0


def test_a_model_is_sampled_as_its_generation_config_says(endless: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(endless, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"do_sample": True, "temperature": 1.5, "top_k": 50}))

    def text(where: Path, *options: str) -> tuple[str, float, str]:
        said = Said(
            "generate", "The sky is", "--model", str(where), "--method", "full", "--max-new-tokens", "16", "--json", *options
        )
        return said.records[0]["text"], said.records[0]["temperature"], said.err

    greedy, drawn = text(endless), text(folder)
    assert greedy[1] == 0
    assert "generation config" not in greedy[2]
    assert drawn[1] == 1.5
    assert "temperature 1.5, top_k 50" in drawn[2]
    assert drawn[0] == text(endless, "--temperature", "1.5", "--top-k", "50")[0] != greedy[0]
    assert text(folder, "--temperature", "0")[::2] == greedy[::2]
    assert text(folder, "--temperature", "1")[:2] == text(endless, "--temperature", "1", "--top-k", "50")[:2]


def test_a_text_that_is_too_long_may_lose_its_middle(model: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The grass is green. " * 500)
    asked = ("generate", "--model", model, "--file", str(path), "--question", "Why?", "--max-new-tokens", "3", "--json")
    refused(Said(*asked), 1, "positions end at 2,048", "--cut")
    said = Said(*asked, "--cut")
    assert re.search(r"--cut leaves out [\d,]+ of 10,000 characters in the middle", said.err)
    (record,) = said.records
    assert 1900 < record["prompt_tokens"] <= 2045
