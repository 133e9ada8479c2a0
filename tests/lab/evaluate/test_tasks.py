"""The tasks: lengths, depths, seeds, scores, and the published formats."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from word_pieces import WordPieces

from kvthaw.engine.hf.model import shipped_path
from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import read_asset
from lab.evaluate.tasks import TASKS, Sample, find
from lab.evaluate.tasks.base import ROOM, Haystack, fingerprint_of, fit, word_list
from lab.evaluate.tasks.keyed import Keyed, KVRetrieval, LongEval
from lab.evaluate.tasks.niah import Niah
from lab.evaluate.tasks.variable_tracking import VariableTracking

MADE = [name for name in TASKS if not name.startswith(("ruler_", "babilong_"))]

# the first lines and the end of LongEval's 200_lines.jsonl, with the other lines left out
LONGEVAL_PROMPT = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of a "
    "certain line index. Now the record start:\n\n"
    "line grotesque-classmate: REGISTER_CONTENT is <42527>\n"
    "line imperfect-bull: REGISTER_CONTENT is <3119>\n"
    "line torpid-kid: REGISTER_CONTENT is <2416>\n"
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line torpid-kid? I need the number. "
)
KV_PROMPT = """Extract the value corresponding to the specified key in the JSON object below.

JSON data:
{"a54e2eed-e625-4570-9f74-3624e77d6684": "d1ff29be-4e2a-4208-a182-0cea716be3d4",
 "9f4a92b9-5f69-4725-ba1e-403f08dea695": "703a7ce5-f17f-4e6d-b895-5836ba5ec71c",
 "52a9c80c-da51-4fc9-bf70-4a4901bc2ac3": "b2f8ea3d-4b1b-49e0-a141-b9823991ebeb"}

Key: "9f4a92b9-5f69-4725-ba1e-403f08dea695"
Corresponding value:"""


@pytest.fixture(scope="module")
def shipped() -> Any:
    """The tokenizer of the shipped model."""
    return AutoTokenizer.from_pretrained(shipped_path())


@pytest.fixture
def tokenizer() -> WordPieces:
    return WordPieces()


class Coarse:
    """A tokenizer under which every word takes three tokens and a break between lines five, so that few lengths can be met."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        lines = text.split("\n")
        return {"input_ids": [0] * (3 * sum(len(line.split()) for line in lines) + 5 * (len(lines) - 1))}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [6001, 8192])
def test_a_prompt_has_at_most_one_percent_less_where_a_tokenizer_cannot_make_the_length(name: str, length: int) -> None:
    tokenizer = Coarse()
    sample = find(name).sample(tokenizer, length=length, seed=1, depth=0.5)
    made = len(tokenizer(sample.prompt)["input_ids"])
    assert length - max(ROOM, length // 100) <= made <= length


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def answer(sample: Sample) -> str:
    return ", ".join(sample.answers)


@pytest.mark.parametrize("name", MADE)
def test_length(shipped: Any, name: str) -> None:
    for seed, length in enumerate((640, 777, 1500)):
        sample = TASKS[name].sample(shipped, length=length, seed=seed)
        n = tokens(shipped, sample.prompt)
        assert n == length
        question = shipped(sample.question, add_special_tokens=False)["input_ids"]
        assert tokens(shipped, sample.context) + len(question) == n, "context and question split where tokens do"


@pytest.mark.parametrize("name", MADE)
def test_deterministic(tokenizer: Any, name: str) -> None:
    task = TASKS[name]
    first, again = (task.sample(tokenizer, length=900, seed=5, depth=0.3) for _ in range(2))
    assert first == again
    other = task.sample(tokenizer, length=900, seed=6, depth=0.3)
    assert other.answers != first.answers


@pytest.mark.parametrize(
    ("name", "depth"), [(name, depth) for turn, name in enumerate(MADE) for depth in ((0.0, 1.0)[turn % 2], 0.25)]
)
def test_depth(tokenizer: Any, name: str, depth: float) -> None:
    sample = TASKS[name].sample(tokenizer, length=3000, seed=1, depth=depth)
    assert sample.depth == pytest.approx(depth, abs=0.08)
    assert all(a in sample.context for a in sample.answers)
    assert name == "kv_retrieval" or not any(a in sample.question for a in sample.answers)


@pytest.mark.parametrize("name", MADE)
def test_score(tokenizer: Any, name: str) -> None:
    task = TASKS[name]
    sample = task.sample(tokenizer, length=640, seed=2)
    assert task.score(sample, f" {answer(sample)}.") == 1.0
    assert task.score(sample, "") == 0.0
    first = sample.answers[0]
    share = 1 / len(sample.answers)
    assert task.score(sample, f"It is '{first}'") == pytest.approx(share)
    other_case = {first.swapcase()} - {first}
    for fooled in (*other_case, first[:-1], first[1:], first + "7", "7" + first, first + "x", f"x{first}", f"{first}-7"):
        assert task.score(sample, f" {fooled}.") == 0.0


@pytest.mark.parametrize("length", [700, 701, 702, 703])
@pytest.mark.parametrize("name", ["passkey", "longeval", "kv_retrieval"])
def test_length_where_tokens_are_bytes(name: str, length: int) -> None:
    sample = TASKS[name].sample(Letters(), length=length, seed=3)
    assert len(sample.prompt) == length
    assert all(answer in sample.context for answer in sample.answers)


def test_spare_words_stand_where_they_disturb_least(tokenizer: Any) -> None:
    def build(n: int, spare: str) -> Sample:
        return Sample("word " * n + spare, "?", (), None)

    made = [fit(tokenizer, length, build, most=9).context for length in range(2, 12)]
    assert made[0] == ""
    assert [context.count("word") for context in made] == sorted(context.count("word") for context in made)
    with pytest.raises(ValueError, match="length 1 is too short for this task: without a haystack it takes 2"):
        fit(tokenizer, 1, build)
    with pytest.raises(ValueError, match="length 500 is too long for this task: all there is of it takes"):
        fit(tokenizer, 500, build, most=9)


def test_files_take_the_place_of_what_is_made(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    record = {
        "expected_number": 2416,
        "correct_line": "line torpid-kid: REGISTER_CONTENT is <2416>\n",
        "prompt": LONGEVAL_PROMPT,
    }
    file.write_text(json.dumps(record) + "\n")
    task = find("longeval", file)
    sample = task.sample(tokenizer, length=500, seed=0)
    assert (task.name, sample.prompt, task.score(sample, " 2416.")) == ("longeval", LONGEVAL_PROMPT, 1.0)
    with pytest.raises(ValueError, match=r"length 100 is too short for the file's sample 0: it has \d+ tokens"):
        task.sample(tokenizer, length=100, seed=0)
    with pytest.raises(ValueError, match="holds 1 samples, from 0 on; there is no sample 1"):
        task.sample(tokenizer, length=500, seed=1)
    with pytest.raises(ConfigError, match=r"task is 'passkeys'; did you mean 'passkey'\? There are: passkey, "):
        find("passkeys")
    with pytest.raises(ConfigError, match="passkey is generated and reads no files"):
        find("passkey", file)
    with pytest.raises(ConfigError, match=r"nowhere.*there is no such file"):
        find("longeval", tmp_path / "nowhere")
    for text, problem in (("{", "not a file of JSON lines"), ("{}", "the field 'expected_number'"), ("", "the field")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            find("longeval", file)


def test_a_hash_stands_for_text_and_files(tmp_path: Path) -> None:
    assert fingerprint_of(None, None) == ""
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("2")
    known = [fingerprint_of("x", None), fingerprint_of("y", None), fingerprint_of(None, tmp_path / "a")]
    known += [fingerprint_of(None, tmp_path / "b"), fingerprint_of(None, tmp_path), fingerprint_of("x", tmp_path)]
    assert len(set(known)) == 6
    (tmp_path / "b").write_text("3")
    assert fingerprint_of(None, tmp_path) not in known


def test_too_short(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="length 20 is too short"):
        TASKS["passkey"].sample(tokenizer, length=20, seed=0)


def test_own_text(tokenizer: Any) -> None:
    text = "Snow fell. Nobody spoke! Why? The lamp went out."
    for name in ("passkey", "niah_multikey", "variable_tracking"):
        sample = TASKS[name].sample(tokenizer, length=800, seed=0, text=text)
        assert "The lamp went out." in sample.context
        assert "Alice" not in sample.context
        assert "grass" not in sample.context
    with pytest.raises(ValueError, match="no word"):
        Haystack.of("  \n ")


def test_facts_stand_between_sentences() -> None:
    text = Haystack.of("One two three. Four five six. Seven eight nine.")
    assert text.with_facts(9, ["X."], [0.4]) == "One two three. Four five six. X. Seven eight nine."
    assert text.with_facts(9, ["X.", "Y."], [0.0, 0.0]) == "X. Y. One two three. Four five six. Seven eight nine."


def test_longeval_is_the_published_format(tmp_path: Path) -> None:
    record = {
        "random_idx": ["torpid-kid", 2],
        "expected_number": 2416,
        "num_lines": 3,
        "correct_line": "line torpid-kid: REGISTER_CONTENT is <2416>\n",
        "prompt": LONGEVAL_PROMPT,
    }
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(record) + "\n")
    (loaded,) = LongEval().reading(file).samples
    assert loaded.prompt == LONGEVAL_PROMPT
    assert loaded.answers == ("2416",)
    assert loaded.depth == 1.0
    made = LongEval().with_records(50, seed=0, depth=0.5)
    head, *lines, blank, question = made.prompt.split("\n")[:1] + made.prompt.split("\n")[2:]
    assert head + "\n\n" == LONGEVAL_PROMPT[: len(head) + 2]
    assert len(lines) == 50
    assert all(line.startswith("line ") and ": REGISTER_CONTENT is <" in line and line.endswith(">") for line in lines)
    assert blank == ""
    key = lines[round(0.5 * 49)].split(" ", 1)[1].split(":")[0]
    assert question == LONGEVAL_PROMPT.rsplit("\n", 1)[1].replace("torpid-kid", key)


def test_kv_is_the_published_format(tmp_path: Path) -> None:
    records = [line.strip(' {},"').split('": "') for line in KV_PROMPT.split("\n")[3:6]]
    records = [[key, value.rstrip('"}')] for key, value in records]
    file = tmp_path / "kv.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.write(json.dumps({"ordered_kv_records": records, "key": records[1][0], "value": records[1][1]}) + "\n")
    (loaded,) = KVRetrieval().reading(file).samples
    assert loaded.prompt == KV_PROMPT
    assert loaded.answers == ("703a7ce5-f17f-4e6d-b895-5836ba5ec71c",)
    made = KVRetrieval().with_records(75, seed=1, depth=0.0)
    data = json.loads(made.context.split("JSON data:\n")[1])
    assert len(data) == 75
    assert data[made.question.split('"')[1]] == made.answers[0]
    assert made.depth == pytest.approx(0.02, abs=0.02)


@pytest.mark.parametrize("task", [LongEval(), KVRetrieval()], ids=lambda task: str(task.name))
def test_depth_says_which_record_is_asked_for(task: Keyed) -> None:
    records = task.make_pairs(50, seed=3)
    for depth, at in ((0.0, 0), (0.5, 24), (1.0, 49)):
        made = task.with_records(50, seed=3, depth=depth)
        assert (made.question, made.answers) == (task.question.format(key=records[at][0]), (records[at][1],))


def test_niah_wording(tokenizer: Any) -> None:
    one = TASKS["niah_single"].sample(tokenizer, length=700, seed=0)
    key = one.question.split("number for ")[1].split(" mentioned")[0]
    assert one.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    assert f"One of the special magic numbers for {key} is: {one.answers[0]}." in one.context
    assert one.question == (
        f"\nWhat is the special magic number for {key} mentioned in the provided text?"
        f" The special magic number for {key} mentioned in the provided text is"
    )
    four = TASKS["niah_multiquery"].sample(tokenizer, length=700, seed=0)
    assert four.question.startswith("\nWhat are all the special magic numbers for ")
    assert four.question.count(", and ") == 2
    assert four.question.endswith(" mentioned in the provided text are")
    values = TASKS["niah_multivalue"].sample(tokenizer, length=700, seed=0)
    assert len(values.answers) == 4
    assert len(set(values.answers)) == 4


def test_niah_needles_hold_the_key_once(tokenizer: Any) -> None:
    for task in (Niah("a", haystack="needles"), Niah("b", haystack="needles", key_kind="uuids", value_kind="uuids")):
        sample = task.sample(tokenizer, length=4000, seed=0)
        key = sample.question.split(" for ")[1].split(" mentioned")[0]
        assert sample.context.count(f" for {key} is: ") == 1


def test_variable_chains(tokenizer: Any) -> None:
    sample = VariableTracking(chains=3, hops=2).sample(tokenizer, length=1500, seed=4)
    assert len(sample.answers) == 3
    a, b, c = sample.answers
    first, second, third = (sample.context.index(s) for s in (f"VAR {a} = ", f"VAR {b} = VAR {a}", f"VAR {c} = VAR {b}"))
    assert first < second < third
    assert sample.context.count("VAR ") == 9 + 6
    assert "3 variables are assgined the value" in sample.question


def test_assets(shipped: Any) -> None:
    book = read_asset("book.txt")
    assert len(book.encode()) <= 500_000
    assert tokens(shipped, book) >= 33_000
    assert shipped.decode(shipped(book)["input_ids"], skip_special_tokens=True) == book
    assert len(word_list("adjectives.txt")) > 900
    assert len(word_list("nouns.txt")) > 6700
    shards = list((shipped_path()).glob("*.safetensors"))
    assert shards
    assert all(shard.stat().st_size < 16_000_000 for shard in shards)
    assert sum(shard.stat().st_size for shard in shards) <= 32_000_000


def test_tokenizer_keeps_keys_and_digits_apart(shipped: Any) -> None:
    def pieces(text: str) -> list[str]:
        return [shipped.decode([i]) for i in shipped(text, add_special_tokens=False)["input_ids"]]

    assert pieces("line torpid-kid: REGISTER_CONTENT is <24>\n") == [
        *("line", " torpid", "-kid", ": REGISTER_CONTENT is <", "2", "4", ">\n"),
    ]
    uuid = "0b018c55-7fd0-48cc-face-2f3a45dd94bf"
    assert pieces(f' "{uuid}"') == [' "', *uuid, '"']
    assert pieces("VAR QWXYZ = 12") == ["VAR", " ", *"QWXYZ", " =", " ", "1", "2"]
