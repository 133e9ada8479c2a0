"""Facts and their questions as token ids: every wording the model learns, composed from pieces tokenised once."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

Ids = list[int]
TASK_NAMES = ["copy", "passkey", "niah", "needles", "uuids", "values", "queries", "lines", "kv", "chains", "other"]
COPY, PASSKEY, NIAH, NEEDLES, UUIDS, VALUES, QUERIES, LINES, KV, CHAINS, OTHER = range(len(TASK_NAMES))
HEX = "0123456789abcdef"


class Pieces:
    """Everything a row is composed of, as token ids; made once, before the workers fork."""

    def __init__(self, folder: Path, tokenizer_file: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.encode: Callable[[str], Ids] = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        word = json.loads((folder / "wording.json").read_text())
        self.word = word
        self.raw = np.load(folder / "books_raw.npy", mmap_mode="r")
        self.flat = np.load(folder / "books_flat.npy", mmap_mode="r")
        self.size = tokenizer.get_vocab_size()
        self.bos, self.eos = 0, 1
        texts = [tokenizer.decode([i]) for i in range(self.size)]
        self.starts = [t[:1] in (" ", "\n") for t in texts]
        self.ends = [t.strip()[-1:] in (".", "!", "?", "”", "’") if t else False for t in texts]
        self.space = self.encode(" ")
        self.line = self.encode("\n")
        self.digit = [self.encode(c)[0] for c in "0123456789"]
        self.hex = {c: self.encode(c)[0] for c in HEX + "-"}
        self.letter = [self.encode(c)[0] for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        self.first = [self.encode(" " + w) for w in word["adjectives"]]
        self.second = [self.encode("-" + w) for w in word["nouns"]]
        self.first_any = [self.encode(" " + w) for w in word["nouns"] + word["any"]]
        self.second_any = [self.encode("-" + w) for w in word["any"] + word["adjectives"]]
        self.plain = [i for i, t in enumerate(texts) if len(t) > 2 and t[0] == " " and t[1:].islower()]
        self.cache: dict[str, Ids] = {}

    def __call__(self, text: str) -> Ids:
        """The ids of a fixed text, remembered."""
        if text not in self.cache:
            self.cache[text] = self.encode(text)
        return self.cache[text]


Turn = list[tuple[Ids, int]]  # a question and its answer: ids with -1, ids with a task
Asker = Callable[[random.Random], Turn]


@dataclass
class Fact:
    """Statements that belong together, and how to ask for them. A statement comes bare (line start) and after a space."""

    statements: list[tuple[Ids, Ids]]
    ask: Asker


class Facts:
    """Draws keys and values, and makes facts of them."""

    def __init__(self, pieces: Pieces, rng: random.Random) -> None:
        self.p = pieces
        self.rng = rng

    # ---- keys and values, each with the space before it

    def number(self, digits: int = 7) -> Ids:
        value = self.rng.randint(10 ** (digits - 1), 10**digits - 1)
        return self.p.space + [self.p.digit[int(c)] for c in str(value)]

    def upto(self, most: int) -> Ids:
        return [self.p.digit[int(c)] for c in str(self.rng.randint(1, most))]

    def hex32(self) -> Ids:
        h = f"{self.rng.getrandbits(128):032x}"
        text = f"{h[:8]}-{h[8:12]}-4{h[13:16]}-{'89ab'[int(h[16], 16) % 4]}{h[17:20]}-{h[20:]}"
        return [self.p.hex[c] for c in text]

    def uuid(self) -> Ids:
        return self.p.space + self.hex32()

    def name(self, n: int = 5) -> Ids:
        return self.rng.choices(self.p.letter, k=n)

    def keys(self, n: int) -> Callable[[], Ids]:
        """Draws different two-word keys; in some rows from few words, so that many keys share one of theirs."""
        p, rng = self.p, self.rng
        first, second = p.first, p.second
        kind = rng.random()
        if kind < 0.3:
            side = max(3, int((n * rng.choice((1.5, 2.5, 5))) ** 0.5) + 1)
            lean = rng.choice((0.4, 1, 2.5))
            first = rng.sample(first, min(len(first), max(3, int(side * lean))))
            second = rng.sample(second, min(len(second), max(3, int(side / lean) + 2)))
        elif kind < 0.4:
            first = p.first_any
        elif kind < 0.47:
            first, second = p.first_any, p.second_any
        seen: set[tuple[int, ...]] = set()

        def draw() -> Ids:
            for _ in range(20):
                key = rng.choice(first) + rng.choice(second)
                if tuple(key) not in seen:
                    break
            else:
                key = rng.choice(p.first) + rng.choice(p.second)
            seen.add(tuple(key))
            return key

        return draw

    # ---- facts

    def niah(self, key: Ids, kind: str, values: list[Ids]) -> Fact:
        """RULER's needle; several values make it a question for all of them."""
        p = self.p
        one, many = kind[:-1], len(values) > 1
        tail = p(f" of the special magic {kind} for") + key + p(" is:")
        statements = [(p("One") + tail + v + p("."), p(" One") + tail + v + p(".")) for v in values]
        if many:
            q = p(f"\nWhat are all the special magic {kind} for") + key + p(" mentioned in the provided text?")
            q = q + p(f" The special magic {kind} for") + key + p(" mentioned in the provided text are")
            a: Ids = []
            for i, v in enumerate(values):
                a = a + (p(",") if i else []) + v
            task = VALUES
        else:
            q = p(f"\nWhat is the special magic {one} for") + key + p(" mentioned in the provided text?")
            q = q + p(f" The special magic {one} for") + key + p(" mentioned in the provided text is")
            a, task = values[0], UUIDS if kind == "uuids" else NIAH
        turn = [(q, -1), (a + p(".") + [p.eos], task)]
        return Fact(statements, lambda _: turn)

    def queries(self, keys: list[Ids], values: list[Ids], kind: str = "numbers") -> Turn:
        """RULER's question for several keys; the answer says each key before its value."""
        p = self.p
        names: Ids = []
        for i, key in enumerate(keys):
            names = names + (p(",") if i else []) + (p(" and") if i == len(keys) - 1 else []) + key
        q = p(f"\nWhat are all the special magic {kind} for") + names + p(" mentioned in the provided text?")
        q = q + p(f" The special magic {kind} for") + names + p(" mentioned in the provided text are")
        a: Ids = []
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            a = a + (p(",") if i else []) + key + p(":") + value
        return [(q, -1), (a + p(".") + [p.eos], QUERIES)]

    def passkey(self) -> Fact:
        p, key = self.p, self.number(5)
        body = key + p(". Remember it.") + key + p(" is the pass key.")
        q = p("\nWhat is the pass key? The pass key is")
        turn = [(q, -1), (key + p(".") + [p.eos], PASSKEY)]
        return Fact([(p("The pass key is") + body, p(" The pass key is") + body)], lambda _: turn)

    def other(self, key: Ids, topic: str, form: int) -> Fact:
        """A fact in another wording, so that the model does not know the benchmarks' alone."""
        p, rng = self.p, self.rng
        value = self.number(rng.randint(3, 9)) if rng.random() < 0.85 else rng.choice(p.first) + rng.choice(p.second)
        if form == 0:
            tail = p(f" {topic} of") + key + p(" is") + value + p(".")
            both = (p("The") + tail, p(" The") + tail)
        elif form == 1:
            tail = p(f" that the {topic} for") + key + p(" is") + value + p(".")
            both = (p("Remember") + tail, p(" Remember") + tail)
        elif form == 2:
            tail = p(f" {topic}") + key + p(" has") + value + p(".")
            both = (p("The") + tail, p(" The") + tail)
        elif form == 3:
            tail = key + p(f" has the {topic}") + value + p(".")
            both = (p("Note:") + tail, p(" Note:") + tail)
        else:
            body = key + p(f" {topic} is") + value + p(". Remember it.") + value + p(" is the") + key + p(f" {topic}.")
            both = (p("The") + body, p(" The") + body)
            q = p("\nWhat is the") + key + p(f" {topic}? The") + key + p(f" {topic} is")
            turn = [(q, -1), (value + p(".") + [p.eos], OTHER)]
            return Fact([both], lambda _: turn)
        if rng.random() < 0.5:
            q = p(f"\nQuestion: What is the {topic} of") + key + p("?\nAnswer:")
        else:
            q = p(f"\nWhat is the {topic} of") + key + p(f"? The {topic} of") + key + p(" is")
        turn = [(q, -1), (value + p(".") + [p.eos], OTHER)]
        return Fact([both], lambda _: turn)

    def chain(self, hops: int) -> Fact:
        """A chain of assignments; asked for as RULER does."""
        p, rng = self.p, self.rng
        names = [self.name() for _ in range(hops + 1)]
        value = self.number(5)
        blank = p.space if rng.random() < 0.7 else []
        lines = [names[0] + p(" =") + value]
        lines += [a + p(" = VAR ") + b + blank for b, a in itertools.pairwise(names)]
        q = p("\nQuestion: Find all variables that are assigned the value") + value + p(" in the text above.")
        q = q + p(" Answer: According to the chain(s) of variable assignment in the text above,")
        q = q + p.space + [p.digit[c] for c in map(int, str(hops + 1))]
        q = q + p(" variables are assgined the value") + value + p(", they are:")
        a: Ids = []
        for name in names:
            a = a + p.space + name
        q, a = q + p.space, a[1:]
        turn = [(q, -1), ([*a, p.eos], CHAINS)]
        return Fact([(p("VAR ") + line, p(" VAR ") + line) for line in lines], lambda _: turn)
