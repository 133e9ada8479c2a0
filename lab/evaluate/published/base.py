"""What every published benchmark shares: the item, how its answer is generated, and where its records come from."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError, at_least, proportion
from kvthaw.evaluate.files import read_json, read_text

Record = Mapping[str, Any]
Ask = Callable[[str], str]
"""Asks a model one short question with full attention and returns its answer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer is generated: its longest length in tokens, the strings that end it, and how tokens are drawn.

    temperature 0 is greedy.
    chat: whether the benchmark's own code asks a chat model through its template.
    """

    max_new_tokens: int
    stops: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    chat: bool = True

    def __post_init__(self) -> None:
        at_least(1, max_new_tokens=self.max_new_tokens)
        at_least(0, temperature=self.temperature)
        proportion(top_p=self.top_p)
        if "" in self.stops:
            raise ConfigError("a stop string is empty; it would end every answer at once")


@dataclass(frozen=True, slots=True)
class Item:
    """One question of a benchmark. `context` can be cached before `question` is known; the prompt is both in one text."""

    id: str
    context: str
    question: str
    gold: dict[str, Any] = field(default_factory=dict)  # what the metric needs

    @property
    def prompt(self) -> str:
        """Context and question in one text."""
        return self.context + self.question


@dataclass(frozen=True)
class Benchmark(ABC):
    """A published benchmark: its prompts, its metric, and where its records are published.

    hub: what `datasets.load_dataset` takes (path, name, split).
    file: the file's name in a folder of several, if not `name`.
    """

    name: str
    generation: Generation
    hub: tuple[str, str | None, str]
    file: str | None = None

    @abstractmethod
    def item(self, record: Record, number: int) -> Item:
        """Return the question of a record, the `number`th of its file. Raises KeyError for a field that is missing."""

    @abstractmethod
    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        """Return the metric, 0..1, as "score", and the benchmark's other counts.

        ask: a judge, for benchmarks that need one.
        """

    def follow_up(self, item: Item, output: str) -> tuple[str, Generation] | None:
        """Return a second prompt whose answer is scored instead, asked again after the first answer, for benchmarks that have
        one."""
        return None

    def check(self) -> None:
        """Raise ConfigError if the metric needs a package that is not installed: before answers, not after the first."""
        return

    def items(self, records: Iterable[Record]) -> list[Item]:
        """Return the questions of all records. Raises ConfigError for a record that is not one of the benchmark's."""
        found = []
        for number, record in enumerate(records):
            try:
                found.append(self.item(record, number))
            except KeyError as error:
                raise ConfigError(
                    f"record {number} of {self.name} has no field {error}; it has: {', '.join(map(str, record))}"
                ) from None
            except (ValueError, TypeError) as error:
                raise ConfigError(f"record {number} of {self.name} cannot be read: {error}") from None
        if not found:
            raise ConfigError(f"the data of {self.name} holds no record")
        return found

    def load(self, data: str | None) -> list[Item]:
        """Return the questions of a file, of a folder that holds a file of this name, or of the hub.

        Raises ConfigError if there are none. Only data="hub" or an id downloads anything.

        data: the path, "hub", or the id of a copy on the hub.
        """
        if data is None:
            raise ConfigError(f"{self.name} needs its data: a file, or hub, which downloads {self.hub[0]}")
        self.check()
        path = Path(data).expanduser()
        if data == "hub" or (
            not path.exists() and data.count("/") == 1 and not data.startswith((".", "/", "~")) and not path.suffix
        ):
            return self.items(_from_hub(self.hub[0] if data == "hub" else data, *self.hub[1:]))
        if path.is_dir():
            names = [f"{self.file or self.name}{end}" for end in ENDINGS]
            there = [path / name for name in names if (path / name).exists()]
            if not there:
                raise ConfigError(f"data is {data!r}; that folder holds none of {', '.join(names)}")
            path = there[0]
        return self.items(read_records(path))


ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv")


def read_records(path: Path) -> Iterator[Record]:
    """Return the records of a .jsonl, .json (a list) or .csv file, gzipped or not. Raises ConfigError for anything else."""
    if not path.name.endswith(ENDINGS):
        raise ConfigError(f"data is {str(path)!r}; it must be one of {', '.join(ENDINGS)}")
    if path.name.endswith(".csv"):
        return csv.DictReader(io.StringIO(read_text(path), newline=""))
    records = read_json(path)
    if isinstance(records, dict) and ".jsonl" in path.suffixes:
        records = [records]  # a file of one line
    if not isinstance(records, list):
        raise ConfigError(f"data is {str(path)!r}, which holds no list of records")
    return iter(records)


def _from_hub(path: str, name: str | None, split: str) -> Iterator[Record]:
    try:
        import datasets
    except ImportError:
        raise ConfigError("data from the hub needs the datasets package: pip install kvthaw[lab]") from None
    try:
        return iter(datasets.load_dataset(path, name, split=split))
    except Exception as error:  # whatever the hub, the network or the format raise
        raise ConfigError(f"data is {path!r}, which could not be loaded from the hub: {error}") from error


def truncate(tokenizer: Any, item: Item, limit: int | None) -> Item:
    """Return the item with its prompt cut in the middle to `limit` tokens, half of them from its head and half from its tail.

    As LongBench's own code does it (v1 and v2): on the tokens of the whole prompt, before any chat template. Where the tail does
    not hold the whole question, it is all that is left of it.
    """
    ids = tokenizer(item.prompt, verbose=False)["input_ids"]
    if limit is None or len(ids) <= limit:
        return item
    half = limit // 2
    if half < 1:
        raise ConfigError(f"length is {limit}; a prompt cut in the middle keeps at least 2 tokens")
    head = tokenizer.decode(ids[:half], skip_special_tokens=True)
    tail = tokenizer.decode(ids[-half:], skip_special_tokens=True)
    if tail.endswith(item.question):
        cut = len(tail) - len(item.question)
        return Item(item.id, head + tail[:cut], item.question, item.gold)
    return Item(item.id, head, tail, item.gold)
