"""Rows of training tokens: contexts full of facts, questions after them.

A row is a context (a haystack of text with facts in it, or records) and then as many questions with their answers as
its share of the row allows, so that one long context gives tens or hundreds of answers to learn from. Only answers and
a sample of the plain text carry loss.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from facts import COPY, KV, LINES, NEEDLES, Asker, Fact, Facts, Ids, Turn


@dataclass
class Row:
    """Token ids, which of them are answers (by group) and which are plain text."""

    ids: Ids = field(default_factory=list)
    answers: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, task
    text: list[tuple[int, int]] = field(default_factory=list)

    def add(self, ids: Ids, task: int = -1) -> None:
        """Appends; with a task the ids are an answer."""
        if task >= 0:
            self.answers.append((len(self.ids), len(self.ids) + len(ids), task))
        self.ids += ids


class Maker(Facts):
    """Makes rows of any length."""

    def row(self, length: int) -> Row:
        rng = self.rng
        short = length <= 1024
        kinds = {
            self.prose: 0.36,
            self.lines: 0.10,
            self.needles: 0.14,
            self.kv: 0.07,
            self.chains: 0.20,
            self.others: 0.07,
            self.copies: 0.10 if short else 0.02,
            self.texts: 0.04,
        }
        row = Row()
        if rng.random() < 0.85:
            row.add([self.p.bos])
        rng.choices(list(kinds), weights=list(kinds.values()))[0](row, length)
        if len(row.ids) > length:
            del row.ids[length:]
            row.answers = [a for a in row.answers if a[1] <= length]
            row.text = [(s, min(e, length)) for s, e in row.text if s < length]
        row.ids += [self.p.eos] * (length - len(row.ids))
        return row

    def share(self, length: int) -> int:
        """How many tokens of a row the questions may take; 0: one question."""
        if self.rng.random() < 0.12:
            return 0
        most = 0.5 if length <= 1024 else 0.45 if length <= 8192 else 0.4
        return int(length * self.rng.uniform(0.12, most))

    def turns(self, askers: list[Asker], room: int) -> list[Turn]:
        """Questions drawn until `room` tokens are full or each was asked (one in five times: twice), at least one."""
        out: list[Turn] = []
        used = 0
        for _ in range(2 if self.rng.random() < 0.2 else 1):
            for ask in self.rng.sample(askers, len(askers)):
                turn = ask(self.rng)
                size = sum(len(ids) for ids, _ in turn)
                if out and used + size > room:
                    return out
                out.append(turn)
                used += size
        return out

    def text(self, n: int) -> Ids:
        """`n` tokens of books, from the start of a word on."""
        source = self.p.raw if self.rng.random() < 0.6 else self.p.flat
        at = self.rng.randrange(len(source) - n - 64)
        for i in range(at, at + 60):
            if self.p.starts[source[i]]:
                at = i
                break
        return source[at : at + n].tolist()

    def finish(self, row: Row, turns: list[Turn]) -> None:
        rare = self.rng.random() < 0.03
        for turn in turns:
            if rare:
                row.add([self.p.bos])
            for ids, task in turn:
                row.add(ids, task)

    def prose(self, row: Row, length: int) -> None:
        """Text, or filler, with facts between its sentences."""
        p, rng = self.p, self.rng
        room = self.share(length)
        most = max(1, (length - room) // 45)
        least = 0 if rng.random() < 0.4 else 0.5 * np.log2(most)
        n = max(1, min(most, int(2 ** rng.uniform(least, np.log2(most) + 0.5))))
        facts, askers, intro = self.facts(n, length - max(room, 70) - 60)
        turns = self.turns(askers, room)
        left = length - len(row.ids) - sum(len(ids) for t in turns for ids, _ in t) - len(intro)
        left -= sum(len(s[1]) for f in facts for s in f.statements)
        if left < 8:
            self.texts(row, length)
            return
        filler = rng.random()
        row.add(intro)
        if filler < 0.72:
            body = self.text(left)
        else:
            tile = p(rng.choice((" {}", " {}\n", " {}\n")).format(p.word["grass"]))
            body = (tile * (left // len(tile) + 1))[:left]
        places: list[tuple[int, int, Ids, Ids]] = []
        for fact in facts:
            spots = sorted(rng.random() for _ in fact.statements)
            for j, (spot, (bare, spaced)) in enumerate(zip(spots, fact.statements, strict=True)):
                places.append((self.spot(body, int(spot * (left + 1)), filler < 0.72), j, bare, spaced))
        places.sort(key=lambda x: (x[0], x[1]))
        at = 0
        for place, _, bare, spaced in places:
            self.add_text(row, body[at:place], filler < 0.72)
            at = place
            row.add(spaced if row.ids[-1:] and (place or row.ids[-1] not in (p.bos, *p.line)) else bare)
        self.add_text(row, body[at:], filler < 0.72)
        self.finish(row, turns)

    def add_text(self, row: Row, ids: Ids, plain: bool) -> None:
        if plain and ids:
            row.text.append((len(row.ids) + 1, len(row.ids) + len(ids)))
        row.ids += ids

    def spot(self, body: Ids, at: int, text: bool) -> int:
        """The next end of a sentence, or of a word."""
        p = self.p
        if at <= 0 or at >= len(body):
            return max(0, min(at, len(body)))
        word = -1
        for i in range(at, min(at + 50, len(body))):
            if p.starts[body[i]]:
                if word < 0:
                    word = i
                if p.ends[body[i - 1]]:
                    return i
        return word if word >= 0 else len(body)

    def facts(self, n: int, room: int) -> tuple[list[Fact], list[Asker], Ids]:
        """At most `n` facts that fit `room` tokens, of one kind or of all, and a fitting introduction."""
        p, rng = self.p, self.rng
        pure = rng.random() < 0.55
        kinds = ["numbers", "values", "queries", "uuids", "words", "other", "chain", "passkey"]
        weights = [0.20, 0.30, 0.12, 0.07, 0.04, 0.12, 0.07, 0.08]
        main = rng.choices(kinds, weights)[0]
        key = self.keys(n)
        facts: list[Fact] = []
        askers: list[Asker] = []
        single: list[tuple[Ids, Ids]] = []
        digits = 7 if rng.random() < 0.8 else rng.randint(3, 10)
        passed = False
        topic, form = rng.choice(p.word["topics"]), rng.randrange(5)
        while len(facts) < n:
            kind = main if pure else rng.choices(kinds, weights)[0]
            if kind == "passkey" and passed:
                kind, pure = "numbers", False
            if kind in ("numbers", "queries"):
                k, v = key(), self.number(digits)
                fact = self.niah(k, "numbers", [v])
            elif kind == "values":
                fact = self.niah(key(), "numbers", [self.number(digits) for _ in range(rng.choice((2, 3, 4, 4, 4)))])
            elif kind == "uuids":
                fact = self.niah(key() if rng.random() < 0.7 else self.uuid(), "uuids", [self.uuid()])
            elif kind == "words":
                fact = self.niah(key(), "words", [rng.choice(p.first) + rng.choice(p.second)])
            elif kind == "other":
                fact = self.other(key() if rng.random() < 0.6 else rng.choices(p.plain, k=rng.randint(1, 3)), topic, form)
            elif kind == "chain":
                fact = self.chain(rng.choice((1, 2, 3, 4, 4, 4, 5)))
            else:
                fact, passed = self.passkey(), True
            room -= sum(len(spaced) for _, spaced in fact.statements)
            if facts and room < 0:
                break
            facts.append(fact)
            if kind in ("numbers", "queries"):
                single.append((k, v))
            if not (pure and main == "queries" and n > 1):
                askers.append(fact.ask)
        if len(single) > 1 and (main == "queries" or rng.random() < 0.3):

            def several(r: random.Random) -> Turn:
                chosen = r.sample(single, min(len(single), r.choice((2, 3, 4, 4, 4))))
                return self.queries([k for k, _ in chosen], [v for _, v in chosen])

            askers += [several] * max(1, len(single) // 3)
        word = p.word
        intros = {
            "passkey": word["passkey_intro"],
            "chain": word["chain_intro"],
            "numbers": word["niah_one"].format(one="number"),
            "values": word["niah_some"].format(kind="numbers"),
            "queries": word["niah_some"].format(kind="numbers"),
            "uuids": word["niah_one"].format(one="uuid"),
            "words": word["niah_one"].format(one="word"),
            "other": "",
        }
        return facts, askers, p(intros[main]) if rng.random() < 0.85 else []

    def records(self, row: Row, length: int, intro: Ids, make: Callable[[], Fact], tail: Ids, mean: int) -> None:
        """Statement after statement, each on its line or after a space."""
        p, rng = self.p, self.rng
        room = self.share(length)
        size = length - len(row.ids) - len(intro) - len(tail) - max(room, mean * 5)
        facts: list[Fact] = []
        lined = rng.random() < 0.8
        body: Ids = []
        while True:
            fact = make()
            new: Ids = []
            for bare, spaced in fact.statements:
                new += bare + p.line if lined else spaced
            if facts and len(body) + len(new) > size:
                break
            facts.append(fact)
            body += new
        if lined and body[-1:] == p.line and not tail:
            body.pop()
        row.add(intro + body + tail)
        left = length - len(row.ids)
        self.finish(row, self.turns([f.ask for f in facts], left if room else 0))

    def needles(self, row: Row, length: int) -> None:
        p, rng = self.p, self.rng
        kind = rng.choices(("numbers", "uuids", "wordnum", "values"), (0.52, 0.14, 0.08, 0.26))[0]
        key = self.keys(max(4, length // 25))
        word = p.word
        if kind == "uuids":
            make = lambda: self.niah(self.uuid(), "uuids", [self.uuid()])  # noqa: E731
            intro, mean = word["niah_one"].format(one="uuid"), 140
        elif kind == "wordnum":
            make = lambda: self.niah(self.number(rng.randint(3, 8)), "words", [rng.choice(p.first) + rng.choice(p.second)])  # noqa: E731
            intro, mean = word["niah_one"].format(one="word"), 25
        elif kind == "values":
            make = lambda: self.niah(key(), "numbers", [self.number() for _ in range(rng.choice((1, 2, 3, 4)))])  # noqa: E731
            intro, mean = word["niah_some"].format(kind="numbers"), 60
        else:
            single: list[tuple[Ids, Ids]] = []
            double = rng.random() < 0.3

            def make() -> Fact:
                k, v = key(), self.number()
                single.append((k, v))
                fact = self.niah(k, "numbers", [v])
                ((a, _),) = [fact.ask(rng)[1]]
                fact.ask(rng)[1] = (a, NEEDLES)
                if double and rng.random() < 0.3:

                    def several(r: random.Random) -> Turn:
                        chosen = r.sample(single, min(len(single), r.choice((2, 3, 4, 4))))
                        if len(chosen) < 2:
                            return fact.ask(r)
                        return self.queries([k for k, _ in chosen], [v for _, v in chosen])

                    return Fact(fact.statements, several)
                return fact

            intro, mean = word["niah_one"].format(one="number"), 45
        self.records(row, length, p(intro) if rng.random() < 0.85 else [], make, [], mean)

    def lines(self, row: Row, length: int) -> None:
        """LongEval's record."""
        p, rng = self.p, self.rng
        key = self.keys(max(4, length // 16))
        trailing = rng.random() < 0.75
        room = self.share(length)
        row.add(p(p.word["lines_intro"]) if rng.random() < 0.85 else [])
        size = length - max(room, 45)
        pairs: list[tuple[Ids, Ids]] = []
        while len(row.ids) + 12 < size or not pairs:
            k, v = key(), self.upto(50000)
            pairs.append((k, v))
            row.ids += p("line") + k + p(": REGISTER_CONTENT is <") + v + p(">\n")

        def asker(k: Ids, v: Ids) -> Asker:
            q = p("\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line") + k
            q = q + p("? I need the number.") + (p.space if trailing else [])
            turn = [(q, -1), ((v if trailing else p.space + v) + [p.eos], LINES)]
            return lambda _: turn

        self.finish(row, self.turns([asker(k, v) for k, v in pairs], length - len(row.ids) if room else 0))

    def kv(self, row: Row, length: int) -> None:
        """Lost-in-the-middle's JSON object."""
        p, rng = self.p, self.rng
        room = self.share(length)
        row.add(p(p.word["kv_intro"]) if rng.random() < 0.9 else [])
        size = length - max(room, 95)
        pairs: list[tuple[Ids, Ids]] = []
        while len(row.ids) + 76 < size or not pairs:
            k, v = self.hex32(), self.hex32()
            row.ids += (p('",\n "') if pairs else p('{"')) + k + p('": "') + v
            pairs.append((k, v))
        row.ids += p('"}')

        def asker(k: Ids, v: Ids) -> Asker:
            turn = [(p('\n\nKey: "') + k + p('"\nCorresponding value:'), -1), (p(' "') + v + p('"') + [p.eos], KV)]
            return lambda _: turn

        self.finish(row, self.turns([asker(k, v) for k, v in pairs], length - len(row.ids) if room else 0))

    def chains(self, row: Row, length: int) -> None:
        """Variable chains in filler or text, their links mixed."""
        p, rng = self.p, self.rng
        room = self.share(length)
        hops = rng.choice((1, 2, 3, 4, 4, 4, 4))
        most = max(1, (length - room) // (18 * (hops + 1)))
        n = 1 if rng.random() < 0.3 else max(1, min(most, int(2 ** rng.uniform(0, np.log2(most) + 1))))
        facts = [self.chain(hops) for _ in range(n)]
        turns = self.turns([f.ask for f in facts], room)
        intro = p(p.word["chain_intro"])
        left = length - len(row.ids) - len(intro) - sum(len(ids) for t in turns for ids, _ in t)
        left -= sum(len(s[1]) for f in facts for s in f.statements)
        if left < 0:
            self.lines(row, length)
            return
        row.add(intro if rng.random() < 0.9 else [])
        plain = rng.random() < 0.4
        line = p(" " + p.word["grass"] + "\n")
        lined, tile = not plain and rng.random() < 0.6, len(line)
        body = self.text(left) if plain else (line * (left // tile + 1))[:left]
        places: list[tuple[int, float, Ids]] = []
        for fact in facts:
            for spot, (_, spaced) in zip(sorted(rng.random() for _ in fact.statements), fact.statements, strict=True):
                place = self.spot(body, int(spot * (left + 1)), plain)
                if lined:
                    place = min(len(body), -(-place // tile) * tile)
                places.append((place, spot, spaced))
        places.sort(key=lambda x: x[:2])
        at = 0
        for place, _, spaced in places:
            self.add_text(row, body[at:place], plain)
            at = place
            row.add(spaced)
        self.add_text(row, body[at:], plain)
        self.finish(row, turns)

    def others(self, row: Row, length: int) -> None:
        p, rng = self.p, self.rng
        key = self.keys(max(4, length // 20))
        topic, form = rng.choice(p.word["topics"]), rng.randrange(5)
        kind = rng.random()

        def make() -> Fact:
            k = (
                key()
                if kind < 0.6
                else self.number(rng.randint(2, 6))
                if kind < 0.8
                else rng.choices(p.plain, k=rng.randint(2, 3))
            )
            return self.other(k, topic, form)

        self.records(row, length, [], make, [], 30)

    def copies(self, row: Row, length: int) -> None:
        """A piece of text, or of random tokens, twice: what begins in-context copying."""
        p, rng = self.p, self.rng
        n = min(rng.randint(length // 6, length // 2), 1500)
        piece = rng.choices(range(2, p.size), k=n) if rng.random() < 0.6 else self.text(n)
        lead = self.text(rng.randint(1, max(1, length - 2 * n - 1))) if length > 2 * n + 2 else []
        row.ids += lead + piece
        row.add(piece[:2])
        row.add(piece[2:], COPY)
        rest = length - len(row.ids)
        if rest > 0:
            self.add_text(row, self.text(rest), True)

    def texts(self, row: Row, length: int) -> None:
        n = length - len(row.ids)
        if n > 0:
            self.add_text(row, self.text(n), True)
