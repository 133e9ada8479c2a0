"""Write questions of MiniLongBench, which have a whole prompt and its answers, as the files of LongBench.

usage: python3 -m lab.longbench_files MINILONGBENCH.jsonl[.gz] FOLDER

`python -m lab reproduce --data FOLDER` and `python -m lab eval` then ask them as LongBench's own files. MiniLongBench asks Qasper
in HotpotQA's words, and ends prompts of MultiNews with a line break; LongBench does neither.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError
from lab.evaluate.assets import read_own
from lab.evaluate.published.base import Record, read_records
from lab.script import run_as_script

WORDS_OF = {"qasper": "hotpotqa"}
"""A set -> the set in whose words MiniLongBench asks it."""


def record(row: Record, template: str) -> dict[str, Any]:
    """Return a row in LongBench's layout. Raises ConfigError if the template did not make its prompt.

    row: task, idx, prompt, and gold: a list of answers, or a dict of answers and all_classes.
    """
    prompt: str = row["prompt"]
    if row["task"] == "multi_news":
        prompt = prompt.removesuffix("\n")
    before, _, rest = template.partition("{context}")
    between, _, after = rest.partition("{input}")
    inner = prompt.removeprefix(before).removesuffix(after)
    context, found, question = inner.rpartition(between) if "{input}" in template else (inner.removesuffix(rest), True, "")
    if not found or template.replace("{context}", context, 1).replace("{input}", question) != prompt:
        raise ConfigError(f"question {row['idx']} of {row['task']} is not in the words of LongBench")
    answers = row["gold"] if isinstance(row["gold"], dict) else {"answers": row["gold"], "all_classes": None}
    return {"_id": f"{row['task']}-{row['idx']}", "context": context, "input": question, **answers}


def main(arguments: list[str]) -> None:
    """See the module."""
    if len(arguments) != 2:
        sys.exit(__doc__)
    source, folder = map(Path, arguments)
    templates, made = json.loads(read_own("longbench.json")), dict[str, list[dict[str, Any]]]()
    for row in read_records(source):
        task = row["task"]
        made.setdefault(task, []).append(record(row, templates[WORDS_OF.get(task, task)][0]))
    folder.mkdir(parents=True, exist_ok=True)
    for task, records in made.items():
        lines = "".join(json.dumps(one) + "\n" for one in records)
        (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
