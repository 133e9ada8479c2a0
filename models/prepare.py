"""Tokenises what training needs: a part of the books, the tasks' wording, and the evaluation prompts.

    python -m models.prepare --data DATA --out FOLDER

DATA holds books/books_train.jsonl.gz, pg_essays/*.txt, words/, longeval/ and lost_in_the_middle/. The book that ships
is held out, and the Paul Graham essays serve as haystacks in the evaluation only.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from lab.evaluate.tasks import TASKS, Sample, keyed, niah, passkey, variable_tracking
from lab.evaluate.tasks.base import GRASS, word_list

TOPICS = ["number", "code", "password", "secret code", "access code", "phone number", "price", "score", "weight"]
TOPICS += ["badge", "ticket", "serial number", "locker", "account", "room", "box"]


def wording(data: Path) -> dict[str, object]:
    """The fixed texts of the tasks, and the words that keys are made of."""
    rng = random.Random(0)
    with gzip.open(data / "words" / "nltk_words_en.txt.gz", "rt", encoding="utf-8") as lines:
        english = [w.strip() for w in lines if w.strip().isalpha() and w.islower() and 3 < len(w) < 12]
    return {
        "grass": GRASS,
        "passkey_intro": passkey.INTRO,
        "niah_some": niah.INTRO,
        "niah_one": niah.INTRO_ONE,
        "lines_intro": keyed.LINES_INTRO,
        "kv_intro": keyed.JSON_INTRO,
        "chain_intro": variable_tracking.INTRO,
        "topics": TOPICS,
        "adjectives": list(word_list("adjectives.txt")),
        "nouns": list(word_list("nouns.txt")),
        "any": rng.sample(english, 6000),
    }


def books(data: Path, tokenizer: object, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Parts of the training books as they are, and parts with every blank run made one space."""
    rng = random.Random(1)
    raw: list[int] = []
    flat: list[int] = []
    with gzip.open(data / "books" / "books_train.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    records = [r for r in records if not r["title"].startswith("Alice")]
    rng.shuffle(records)
    for i, record in enumerate(records):
        text = record["text"]
        at = rng.randrange(max(1, len(text) - 250_000))
        part = text[at : at + 250_000]
        if i % 3 == 2:
            flat += tokenizer(" " + " ".join(part.split()), add_special_tokens=False)["input_ids"]
        else:
            raw += tokenizer("\n" + part, add_special_tokens=False)["input_ids"]
        if len(raw) + len(flat) > most:
            break
    return np.array(raw, np.uint16), np.array(flat, np.uint16)


def answer_text(task: str, sample: Sample) -> str:
    """The answer as the model is taught to give it."""
    a = sample.answers
    if task == "longeval":
        return a[0] if sample.question.endswith(" ") else " " + a[0]
    if task == "kv_retrieval":
        return f' "{a[0]}"'
    if task == "variable_tracking":
        return " ".join(a)
    if task == "niah_multiquery":
        names = sample.question.split("special magic numbers for ")[1].split(" mentioned")[0]
        keys = names.replace(", and ", ", ").split(", ")
        return "".join(("," if i else "") + f" {k}: {v}" for i, (k, v) in enumerate(zip(keys, a, strict=True)))
    if task == "niah_multivalue":
        return ",".join(" " + v for v in sorted(a, key=sample.context.index))
    return " " + a[0]


def evaluation(data: Path, tokenizer: object, quick: bool) -> list[tuple[str, int, list[int], int]]:
    """(name, length, ids, how many of them are the answer) of every sample that training is judged by."""
    essays = " ".join(p.read_text(encoding="utf-8") for p in sorted((data / "pg_essays").glob("*.txt")))
    out: list[tuple[str, int, list[int], int]] = []

    def put(label: str, task: str, length: int, sample: Sample) -> None:
        prompt = tokenizer(sample.prompt)["input_ids"]
        answer = tokenizer(answer_text(task, sample), add_special_tokens=False)["input_ids"]
        out.append((label, length, prompt + answer, len(answer)))

    n = 4 if quick else 32
    plan = {
        "passkey": (1024, 4096, 16384, 32768, 65536),
        "passkey_book": (1024, 4096, 16384, 32768, 65536),
        "niah_single": (4096, 32768),
        "niah_single_grass": (32768,),
        "niah_single_uuid": (4096, 32768),
        "niah_multikey": (4096, 32768, 65536),
        "niah_multikey_needles": (4096, 16384, 32768),
        "niah_multikey_uuid": (4096, 32768),
        "niah_multivalue": (4096, 32768),
        "niah_multiquery": (4096, 32768),
        "longeval": (4096, 32768),
        "kv_retrieval": (16384, 32768),
        "variable_tracking": (4096, 32768),
    }
    for name, lengths in plan.items():
        for length in lengths:
            for i in range(n if length <= 16384 or quick else 24 if length <= 32768 else 12):
                text = essays if name.startswith("niah") and "needles" not in name and "grass" not in name and i % 2 else None
                text = None if name in ("niah_multikey_uuid", "niah_multikey_needles", "niah_single_grass") else text
                put(name, name, length, TASKS[name].sample(tokenizer, length=length - 96, seed=7000 + i, text=text))
    for count in (200, 400, 600, 1000, 1350):
        file = next((data / "longeval").glob(f"{count}_lines.jsonl*"))
        for sample in keyed.LongEval().reading(file).samples[: 4 if quick else 50]:
            put(f"longeval {count} lines", "longeval", 0, sample)
    file = data / "lost_in_the_middle" / "kv-retrieval-75_keys.jsonl.gz"
    for sample in keyed.KVRetrieval().reading(file).samples[: 4 if quick else 100]:
        put("kv 75 keys", "kv_retrieval", 0, sample)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path(__file__).parents[1] / "src" / "kvthaw" / "assets" / "model")
    parser.add_argument("--tokens", type=int, default=9_000_000)
    parser.add_argument("--quick", action="store_true", help="few evaluation samples")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    (args.out / "wording.json").write_text(json.dumps(wording(args.data)))
    raw, flat = books(args.data, tokenizer, args.tokens)
    np.save(args.out / "books_raw.npy", raw)
    np.save(args.out / "books_flat.npy", flat)
    samples = evaluation(args.data, tokenizer, args.quick)
    np.savez_compressed(
        args.out / "eval.npz",
        ids=np.concatenate([np.array(s[2], np.uint16) for s in samples]),
        sizes=np.array([len(s[2]) for s in samples]),
        answers=np.array([s[3] for s in samples]),
        lengths=np.array([s[1] for s in samples]),
        names=np.array([s[0] for s in samples]),
    )
    print(len(raw), len(flat), len(samples))


if __name__ == "__main__":
    main()
