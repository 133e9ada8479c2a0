"""What a question recalls, and the page that shows it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from unpacking import ints, sets

import bytemodel
from kvthaw import Cache
from kvthaw.engine.chat_template import following
from kvthaw.engine.decode import generate
from kvthaw.engine.hf.model import load
from kvthaw.engine.prefill import prefill
from kvthaw.engine.sampling import GREEDY, Sampling
from kvthaw.errors import ConfigError
from kvthaw.evaluate.variant import Variant, complete
from kvthaw.inspect.pack import pack, pack_sets
from kvthaw.inspect.page import standalone, text_data
from kvthaw.inspect.run import Inspection, inspect
from tokenizers_of import WORDS

DOCUMENT = "The </script> of the <b>mouse</b> & its “long” tale. " * 8
STEPS = 12


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(str(bytemodel.save(tmp_path_factory.mktemp("model"), ends=False)), dtype="float32")


@pytest.fixture(scope="session")
def inspection(tiny: tuple[Any, Any]) -> Inspection:
    variants = [complete(tiny[0], Variant(method, 64, dense_layers=0)) for method in ("oracle", "quest")]
    return inspect(*tiny, DOCUMENT, "Whose?", variants, limit=STEPS)


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


@pytest.mark.parametrize("values", [[], [0], [255], [256, 0], [3, 70000, 16777215]])
def test_integers_come_back(values: list[int]) -> None:
    assert ints(pack(torch.tensor(values, dtype=torch.int64))) == values


@pytest.mark.parametrize(("steps", "layers", "heads", "width"), [(1, 1, 1, 1), (5, 2, 3, 9), (4, 1, 2, 0), (3, 0, 0, 0)])
def test_sets_come_back(steps: int, layers: int, heads: int, width: int) -> None:
    rows, other = torch.randint(-4, 30, (2, steps, layers, heads, width), dtype=torch.int32).clamp_min(-1)
    wanted, best = (
        [set(x[t, layer, h].tolist()) - {-1} for layer in range(layers) for h in range(heads) for t in range(steps)]
        for x in (rows, other)
    )
    assert sets(pack_sets(rows, 30), steps) == wanted
    assert sets(pack_sets(other, 30, rows), steps, wanted) == best


@pytest.mark.parametrize(
    ("method", "sampling"),
    [
        ("quest", GREEDY),
        ("clusterkv-plus", GREEDY),
        ("icecache-digest", GREEDY),
        ("quest", Sampling(temperature=1.5, top_p=0.9, seed=3, repetition_penalty=1.2)),
    ],
)
def test_the_answer_is_that_of_generate(tiny: tuple[Any, Any], method: str, sampling: Sampling) -> None:
    """The question is a part of the prompt: no token of it goes through the method."""
    model, tokenizer = tiny
    variant, question = (
        complete(model, Variant(method, 24, dense_layers=0)),
        "Whose is the long and sad tale, and of which mouse? " * 2,
    )
    cache = Cache(model, method, **variant.limits)
    ids = tokenizer(DOCUMENT + following(DOCUMENT, question))["input_ids"]
    said = list(generate(model, cache, prefill(model, cache, ids), limit=STEPS, sampling=sampling, prompt=ids))
    found = inspect(model, tokenizer, DOCUMENT, question, [variant], limit=STEPS, sampling=sampling)
    assert found.answer == said
    assert not found.runs[0].recording.selected[0]
    assert all(found.runs[0].recording.selected[1:])


def test_every_method_sees_the_tokens_of_the_first(inspection: Inspection) -> None:
    assert len(inspection.answer) == STEPS
    assert [len(run.recording.selected) for run in inspection.runs] == [STEPS] * 2
    assert inspection.runs[0].said == inspection.answer
    assert all(len(run.places["fetched"]) == STEPS for run in inspection.runs)


def test_the_exact_method_selects_the_exact_top_k(inspection: Inspection) -> None:
    recording = inspection.runs[0].recording
    for selected, exact, mass in zip(recording.selected[1:], recording.exact[1:], recording.mass[1:], strict=True):
        assert sorted(selected) == [0, 1]
        for layer, rows in selected.items():
            assert rows.shape[0] == 2
            assert rows.max() >= 0
            assert torch.equal(rows.sort(dim=1).values, exact[layer].sort(dim=1).values)
            assert ((mass[layer] > 0) & (mass[layer] <= 1 + 1e-5)).all()


def test_the_page_has_it_all_and_runs_nothing_of_the_text(inspection: Inspection, tiny: tuple[Any, Any]) -> None:
    page = standalone(inspection, tiny[1], "<i>title</i>")
    assert "<i>title" not in page
    assert "<b>mouse" not in page
    assert page.count("</script>") == 2
    assert "default-src 'none'" in page
    assert not re.search(r"https?://", page)
    data = data_of(page)
    lengths = ints(data["lengths"])
    assert data["text"].startswith(DOCUMENT)
    assert sum(lengths) == len(data["text"].encode("utf-16-le")) // 2
    assert (data["document"], len(lengths) - data["answer"]) == (len(inspection.document), STEPS)
    for run, shown in zip(inspection.runs, data["runs"], strict=True):
        found = sets(shown["selected"], STEPS)
        steps = [(layer, head, step) for layer in (0, 1) for head in (0, 1) for step in run.recording.selected]
        assert found == [set(step[layer][head].tolist()) - {-1} if step else set() for layer, head, step in steps]
        assert len(ints(shown["mass"])) == len(found)


def test_a_page_that_is_too_large_has_coarser_positions(inspection: Inspection, tiny: tuple[Any, Any]) -> None:
    whole = len(standalone(inspection, tiny[1], "t").encode())
    page = standalone(inspection, tiny[1], "t", most_bytes=whole - 500)
    assert len(page.encode()) <= whole - 500
    (grain,) = {run["grain"] for run in data_of(page)["runs"]}
    assert grain > 1
    rows = inspection.runs[0].recording.selected[1][0][0]
    assert sets(data_of(page)["runs"][0]["selected"], STEPS)[1] == {row // grain for row in rows.tolist() if row >= 0}
    with pytest.raises(ConfigError, match="bytes"):
        standalone(inspection, tiny[1], "t", most_bytes=1000)


def test_a_method_that_retrieves_nothing_is_refused(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="full"):
        inspect(*tiny, "text", "question", [Variant("full")])


@pytest.mark.parametrize("kind", WORDS)
def test_the_text_of_a_page_is_that_of_all_its_tokens(kind: str) -> None:
    tokenizer = WORDS[kind]()
    tokens = tokenizer("the king, a the playing the end", add_special_tokens=False)["input_ids"]
    for first, second in ((4, 9), (0, 5), (6, 6)):
        said = text_data(tokenizer, tokens[:first], tokens[first:second], tokens[second:])
        assert said["text"] == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
