"""LongEval (LMSYS, 2023). Lines: what is the register's content in line X? Topics: what was talked about first?"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .base import ASSETS, FromFile, Sample, ahead, depth_of, distinct, fit, match_any, read_records, word_key
from .keyed import Keyed

INTRO = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of a "
    "certain line index. Now the record start:\n\n"
)
LINE = "line {key}: REGISTER_CONTENT is <{value}>\n"
TOPICS = (
    "Below is a record of our previous conversation on {count} different topics. You are the ASSISTANT, and I am the USER. "
    "At the beginning of each topic, the USER will say 'I would like to discuss the topic of <TOPIC>'. Memorize each <TOPIC>. "
    "At the end of the record, I will ask you to retrieve the first topic. Now the record start. "
)
TOPICS_QUESTION = (
    " Now the record ends. What is the first topic we discussed? Only give me the topic name. Do not summarize yourself."
)
QUESTION = "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number. "


@dataclass(frozen=True)
class LongEval(Keyed):
    """Lines until the length is reached; in the published files 200 to 1350."""

    name: str = "longeval"
    max_new_tokens: int = 8
    stops: tuple[str, ...] = ("\n",)

    def make_pairs(self, n: int, seed: int) -> list[tuple[str, str]]:
        """See Keyed; an adjective and a noun, and a number up to 50,000."""
        rng = random.Random(f"{seed} lines")
        return [(key, str(rng.randint(1, 50000))) for key in distinct(rng, word_key, n)]

    def write(self, records: Sequence[tuple[str, str]]) -> tuple[str, list[str]]:
        """See Keyed."""
        lines = [LINE.format(key=key, value=value) for key, value in records]
        return INTRO + "".join(lines), lines

    def question(self, key: str) -> str:
        """See Keyed."""
        return QUESTION.format(key=key)

    def reading(self, path: Path) -> FromFile:
        """See Reads; a published file, `200_lines.jsonl` and its like (gzip too), prompts byte for byte."""
        return FromFile.of(self, map(self._read, read_records(path, "expected_number")))

    @staticmethod
    def _read(record: dict[str, Any]) -> Sample:
        prompt: str = record["prompt"]
        cut = prompt.rindex("\nNow the record is over.")
        context = prompt[:cut]
        depth = depth_of(context, record["correct_line"])
        return Sample(context, prompt[cut:], (str(record["expected_number"]),), depth)


@dataclass(frozen=True)
class LongEvalTopics:
    """Conversations until the length is reached, the last cut short; in the published files 5 to 30, none cut.

    Where those that ship run out they come again, all but the first. LongEval leaves the judgement to a language model; here the
    topic has to stand in the output, upper or lower case, without its article.
    """

    name: str = "longeval_topics"
    max_new_tokens: int = 50
    stops: tuple[str, ...] = ("\n",)

    def sample(self, tokenizer: Any, *, length: int, seed: int, depth: float | None = None, text: str | None = None) -> Sample:
        """See Task.sample; the unit is a word of the conversations after the first, which is asked for whatever `depth` says."""
        records = read_records(ASSETS / "conversations.jsonl", "topic")
        first, *others = random.Random(seed).sample(records, len(records))
        words = [re.findall(r"\S+\s*", one["conversation"]) for one in others]

        def build(n: int, spare: str) -> Sample:
            shown = [first["conversation"]]
            for one in itertools.cycle(words):
                if n <= 0:
                    break
                shown.append("".join(one[:n]))
                n -= len(one)
            context = ahead(spare, (TOPICS.format(count=len(shown)) + "".join(shown)).rstrip())
            return Sample(context, TOPICS_QUESTION, (first["topic"],), depth_of(context, first["conversation"].rstrip()))

        return fit(tokenizer, length, build)

    def reading(self, path: Path) -> FromFile:
        """See Reads; a published file, `5_topics.jsonl` and its like (gzip too), prompts byte for byte."""
        return FromFile.of(self, map(self._read, read_records(path, "topics")))

    def score(self, sample: Sample, output: str) -> float:
        """1 if the first topic stands in the output."""
        return match_any((re.sub("^the ", "", sample.answers[0].lower()),), output)

    @staticmethod
    def _read(record: dict[str, Any]) -> Sample:
        prompt: str = record["prompt"]
        cut = prompt.rindex(" Now the record ends.")
        return Sample(prompt[:cut], prompt[cut:], (record["topics"][0],), None)


GENERATORS = (LongEval(), LongEvalTopics())
