"""Let hostile clients at a server, and see what honest ones beside them notice.

`python -m lab.soak --seconds 600`: a server of the model that ships, whose memory is bounded, answers honest clients alone,
then beside hostile ones that send what is to be refused (bodies that are far too large or no requests, costly numbers and schemas,
half of a request), then beside hostile ones that send what is to be served, too (long prompts, many outputs, documents that
others delete), and leave; all three several times by turns. Each honest client has its API key, and the hostile ones share one.
At the end all is quiet for a while. The last line has the honest
clients' times, the answers by status, and the server's resident memory after each turn; a summary of it goes to stderr. It exits
with 1 where an answer is 500 or above, an honest client got none, or the server ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2

from kvthaw.errors import KvthawError
from lab.script import Report, options, run_as_script

JSON = {"Content-Type": "application/json"}
LARGE = 1 << 20
"""Bytes of a large body."""
Send = Callable[[httpx2.AsyncClient, random.Random], Awaitable[int | None]]
"""Sends something hostile. Returns the status of the answer, None where it did not wait for one."""


def list_of(path: str, field: str, item: str, rest: str = "") -> Send:
    """A list with as many items as a large body has room for."""
    body = f'{{"{field}":[' + f"{item}," * (LARGE // (len(item) + 1)) + f"{item}]{rest}}}"
    return posted(path, body)


def posted(path: str, body: str | dict[str, Any], **headers: str) -> Send:
    """A body, whatever it is."""
    content = body if isinstance(body, str) else json.dumps(body)

    async def send(client: httpx2.AsyncClient, rng: random.Random) -> int:
        return (await client.post(path, content=content, headers=JSON | headers)).status_code

    return send


def asked(**more: Any) -> Send:
    """A completion."""
    return posted("/v1/completions", {"prompt": "the fox", "max_tokens": 4} | more)


def shaped(schema: dict[str, Any]) -> Send:
    """A completion that is to follow a schema."""
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return asked(response_format=named)


async def leave(client: httpx2.AsyncClient, rng: random.Random) -> None:
    """Ask for a long answer, and leave."""
    body = {"prompt": "a dog", "max_tokens": 500, "ignore_eos": True, "stream": rng.random() < 0.5}
    body |= {"kv_name": f"left-{rng.randrange(4)}"} if rng.random() < 0.3 else {}
    try:
        async with asyncio.timeout(rng.uniform(0.01, 1)):
            await client.post("/v1/completions", json=body)
    except TimeoutError:
        return


async def half(client: httpx2.AsyncClient, rng: random.Random) -> None:
    """Send half of a request, or headers without an end."""
    url = client.base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        writer.write(b"X: " + b"y" * LARGE if rng.random() < 0.5 else b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        async with asyncio.timeout(rng.uniform(0.1, 2)):
            await reader.read()
    except (OSError, TimeoutError):
        return
    finally:
        writer.close()


async def document(client: httpx2.AsyncClient, rng: random.Random) -> int:
    """Keep, replace, describe or delete one of a few documents."""
    name, text = f"doc-{rng.randrange(4)}", "a b c d " * rng.choice((5, 50))
    match rng.randrange(5):
        case 0:
            return (await client.delete(f"/v1/contexts/{name}")).status_code
        case 1:
            return (await client.get(f"/v1/contexts/{name}")).status_code
        case 2:
            return (await client.post("/v1/completions", json={"prompt": text, "max_tokens": 1, "kv_name": name})).status_code
        case 3:
            return (await client.get(f"/v1/contexts/..%2f{name}%00", headers={"Host": "evil.example"})).status_code
        case _:
            return (await client.post("/v1/contexts", json={"name": name, "text": text})).status_code


REFUSED: dict[str, Send] = {
    "empty messages": list_of("/v1/chat/completions", "messages", "{}"),
    "empty input": list_of("/v1/responses", "input", "{}"),
    "stop of numbers": list_of("/v1/completions", "stop", "1"),
    "stop strings": list_of("/v1/completions", "stop", '"abc"', ',"prompt":"x"'),
    "stop tokens": list_of("/v1/completions", "stop_token_ids", "7", ',"prompt":"x"'),
    "prompts": list_of("/v1/completions", "prompt", '"a"'),
    "tokens": list_of("/v1/completions", "prompt", "7"),
    "parts": list_of("/v1/chat/completions", "x", '{"type":"text","text":"a"}', ',"messages":[]'),
    "a long text": asked(prompt="the fox runs. " * (LARGE // 14)),
    "a long word": asked(prompt="a" * LARGE),
    "tokenized": posted("/tokenize", {"prompt": "the fox runs. " * (LARGE // 14)}),
    "a large number": posted("/v1/completions", '{"prompt":"x","top_k":1' + "0" * 4000 + "}"),
    "deep": posted("/v1/completions", '{"prompt":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "half a character": posted("/v1/chat/completions", '{"messages":[{"role":"user","content":"\\ud800"}]}'),
    "no number": posted("/v1/completions", '{"prompt":"x","temperature":NaN}'),
    "half a request": half,
    "a pattern": shaped({"type": "string", "pattern": "(.{1,4000}){1,4000}"}),
    "deep patterns": shaped({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"}),
    "a loop": shaped({"$ref": "#"}),
    "a run": posted("/v1/recalls/x/runs", {"method": "clusterkv:clusters=1000000000"}),
    "ids": posted("/detokenize", {"tokens": [2147483647] * 1000}),
}
"""What a server refuses, or never gets."""
SERVED: dict[str, Send] = {
    "arrays": shaped({"type": "array", "minItems": 4096, "items": {"type": "array", "minItems": 4096}}),
    "no words": asked(prompt="\0" + "\x7f" * 9),
    "many outputs": asked(n=68, max_tokens=16, ignore_eos=True),
    "a long prompt": asked(prompt=[7 + i * 31 % 400 for i in range(1500)], max_tokens=1),
    "log-probabilities": asked(prompt=[7 + i % 400 for i in range(1500)], max_tokens=1, logprobs=20, echo=True),
    "leaves": leave,
    "documents": document,
}
"""What it serves to anyone who may ask."""
BOTH = REFUSED | SERVED
SHARES = {"alone": 0.25, "refused": 0.375, "served": 0.375}
"""Of the time: without hostile clients, beside those whose requests are refused, and beside all of them."""
HOSTILE_KEY = "hostile"


def honest_key(number: int) -> str:
    """Return the API key of an honest client."""
    return f"honest-{number}"


def bearer(key: str) -> dict[str, str]:
    """Return the header of an API key."""
    return {"Authorization": f"Bearer {key}"}


async def honest(client: httpx2.AsyncClient, ends: float, number: int, seconds: list[float], answers: Counter[str]) -> None:
    """Ask for short answers, one after the other."""
    while time.monotonic() < ends:
        began = time.monotonic()
        body = {"prompt": f"Story {number}: the king", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
        try:
            answer = await client.post("/v1/completions", json=body, headers=bearer(honest_key(number)))
            answers[str(answer.status_code)] += 1
        except httpx2.TransportError as error:
            answers[type(error).__name__] += 1
        seconds.append(time.monotonic() - began)


@dataclass
class Noticed:
    """What honest clients noticed: how long each of their requests took, and how many got which answer."""

    seconds: list[float] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)

    def percentile(self, n: int) -> float:
        """Return within how many seconds n of a hundred requests were answered."""
        cuts = quantiles(self.seconds, n=100, method="inclusive") if len(self.seconds) > 1 else self.seconds * 99
        return cuts[n - 1]


class Hostile:
    """Clients that send what is hostile, one after the other. answers: by kind; longest: seconds until one came."""

    def __init__(self, kinds: dict[str, Send], seed: int | str) -> None:
        self.kinds, self.seed = kinds, seed
        self.answers = {kind: Counter[str]() for kind in kinds}
        self.longest = dict.fromkeys(kinds, 0.0)

    async def __call__(self, client: httpx2.AsyncClient, ends: float, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        while (began := time.monotonic()) < ends:
            kind = rng.choice(list(self.kinds))
            try:
                said = str(await self.kinds[kind](client, rng) or "left")
            except httpx2.TransportError as error:
                said = type(error).__name__
            self.answers[kind][said] += 1
            self.longest[kind] = max(self.longest[kind], time.monotonic() - began)
            await asyncio.sleep(rng.uniform(0, 0.2))


async def clients(url: str, seconds: float, good: int, bad: int = 0, hostile: Hostile | None = None) -> Noticed:
    """Return what so many honest clients got in a time, beside so many hostile ones."""
    found, ends = Noticed(), time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client,
        httpx2.AsyncClient(base_url=url, timeout=120, limits=limits, headers=bearer(HOSTILE_KEY)) as other,
    ):
        await asyncio.gather(
            *(honest(client, ends, number, found.seconds, found.answers) for number in range(good)),
            *(hostile(other, ends, number) for number in range(bad) if hostile is not None),
        )
    return found


def resident(pid: int) -> int:
    """MiB of a process that are resident now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20


@contextmanager
def served(model: str, memory: int, keys: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve a model to clients with API keys, with so many bytes of address space. Yields the process, and its URL once it takes
    requests. What it logs goes to stderr in the end."""
    sizes = ["--max-len", "2048", "--max-seqs", "8", "--prefix-memory", "1GB"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        (Path(folder) / "keys").write_text("\n".join(keys))
        command = [
            sys.executable,
            "-m",
            "kvthaw",
            "serve",
            model,
            "--port",
            "0",
            "--device",
            "cpu",
            *sizes,
            "--kv-dir",
            f"{folder}/kv",
            "--api-key-file",
            f"{folder}/keys",
        ]
        server = subprocess.Popen(
            command, stderr=log, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        )
        try:
            url = None
            while url is None and server.poll() is None:
                time.sleep(0.2)
                url = re.search(r"http://\S+", Path(log.name).read_text())
            if url is None:
                raise KvthawError(f"the server did not start: {Path(log.name).read_text()[-2000:]}")
            yield server, url[0]
        finally:
            server.terminate()
            server.wait(90)
            print(Path(log.name).read_text(errors="replace")[-20_000:], file=sys.stderr)


def measured(server: subprocess.Popen[bytes], url: str, given: argparse.Namespace) -> dict[str, Any]:
    """Return what honest clients see alone and beside hostile ones."""
    asyncio.run(clients(url, 3, given.honest))  # what is made once
    line: dict[str, Any] = {name: vars(given)[name] for name in ("seconds", "turns", "honest", "hostile", "model")}
    before = resident(server.pid)
    phases = {"alone": Hostile({}, given.seed), "refused": Hostile(REFUSED, given.seed), "served": Hostile(BOTH, given.seed)}
    noticed = {name: Noticed() for name in phases}
    held = list[int]()
    for turn in range(given.turns):  # what else the machine does changes, and is to change all three alike
        for name, hostile in phases.items():
            hostile.seed = f"{given.seed} {turn}"
            seconds, bad = given.seconds * SHARES[name] / given.turns, given.hostile if hostile.kinds else 0
            found = asyncio.run(clients(url, seconds, given.honest, bad, hostile))
            noticed[name].seconds += found.seconds
            noticed[name].answers += found.answers
        held.append(resident(server.pid))
    time.sleep(given.quiet)
    answers, others = Counter[str](), Counter[str]()
    for name, found in noticed.items():
        line |= {
            f"{name}_requests": len(found.seconds),
            f"{name}_p50_s": found.percentile(50),
            f"{name}_p99_s": found.percentile(99),
        }
        line[f"{name}_p99_times"] = found.percentile(99) / noticed["alone"].percentile(99)
        answers += found.answers
        others += sum(phases[name].answers.values(), Counter[str]())
        for kind, longest in phases[name].longest.items():
            print(f"{name}: {kind}: {dict(phases[name].answers[kind])}, {longest:.2f} s at most", file=sys.stderr)
    line |= {"honest_answers": dict(answers), "hostile_answers": dict(others)}
    return line | {"mib_before": before, "mib_by_turn": held, "mib_after": resident(server.pid)}


def summary(line: dict[str, Any]) -> str:
    """Return what was asked of a server, in words."""
    times = "; ".join(f"{name} {line[f'{name}_p99_s']:.2f} s ({line[f'{name}_p99_times']:.2f} times)" for name in SHARES)
    memory = " ".join(f"{mib:,}" for mib in line["mib_by_turn"])
    failed = sum(count for status, count in line["hostile_answers"].items() if status.startswith("5"))
    lines = [
        f"honest p99: {times}",
        f"memory: {line['mib_before']:,} MiB before, {memory} after each turn, {line['mib_after']:,} at the end",
        f"answers of 500 and above: {failed}; honest: {line['honest_answers']}",
    ]
    return "\n".join(lines)


def main() -> None:
    given = options(
        __doc__,
        seconds=600.0,
        turns=4,
        honest=8,
        hostile=32,
        quiet=10.0,
        memory_gib=9,
        model="shipped",
        seed=0,
        out=Path,
        commit=str,
    )
    report = Report(given.out, given.commit)
    keys = [HOSTILE_KEY, *map(honest_key, range(given.honest))]
    with served(given.model, given.memory_gib << 30, keys) as (server, url):
        line = measured(server, url, given)
    report(line)
    print(summary(line), file=sys.stderr)
    failed = any(status.startswith("5") for status in line["hostile_answers"])
    sys.exit(bool(failed or set(line["honest_answers"]) != {"200"} or server.returncode))


if __name__ == "__main__":
    run_as_script(main)
