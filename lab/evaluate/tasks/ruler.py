"""RULER (Hsieh et al., 2024): its 13 tasks, in the published generators' formats and under their names, `ruler_` before them.

Three things differ. The length of a prompt excludes the answer's tokens, which RULER includes. The shipped book is the
default haystack. The user supplies the files of qa_1 and qa_2 (see documents.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import Anywhere, Sample, Task
from .documents import Documents, read_hotpot, read_squad
from .niah import Niah
from .variable_tracking import VariableTracking
from .words import CommonWords, FrequentWords


@dataclass(frozen=True)
class Ruler(Anywhere):
    """A generator of this package under RULER's name, with its number of new tokens and its metric.

    essay: whether the haystack is text, which a user's text replaces. RULER's own are Paul Graham's essays.
    """

    name: str
    made_by: Task
    max_new_tokens: int
    essay: bool = False
    stops: tuple[str, ...] = ()

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        haystack = text if self.essay else None
        return self.made_by.sample(tokenizer, length=length, seed=seed, depth=depth, text=haystack)


def _niah(name: str, **settings: Any) -> Ruler:
    needles = Niah(name, **settings)
    return Ruler(name, needles, 128, essay=needles.haystack == "book")


GENERATORS: tuple[Task, ...] = (
    _niah("ruler_niah_single_1", haystack="grass"),
    _niah("ruler_niah_single_2"),
    _niah("ruler_niah_single_3", value_kind="uuids"),
    _niah("ruler_niah_multikey_1", keys=4),
    _niah("ruler_niah_multikey_2", haystack="needles"),
    _niah("ruler_niah_multikey_3", haystack="needles", key_kind="uuids", value_kind="uuids"),
    _niah("ruler_niah_multivalue", values=4),
    _niah("ruler_niah_multiquery", keys=4, queries=4),
    Ruler("ruler_vt", VariableTracking("ruler_vt", example=True), 30),
    CommonWords("ruler_cwe"),
    FrequentWords("ruler_fwe"),
    Documents("ruler_qa_1", read_squad),
    Documents("ruler_qa_2", read_hotpot),
)
