"""Let hostile clients at a server, and see what honest ones beside them notice.

`python -m lab.soak --seconds 600`: a server of the model that ships, whose memory is bounded, answers honest clients alone,
then beside hostile ones that send what is to be refused (bodies that are far too large or no requests, costly numbers and schemas,
half of a request), then beside hostile ones that send what is to be served, too (long prompts, many outputs, documents that
others delete), and leave; all three several times by turns. Each honest client has its API key, and the hostile ones share one
and a process. With `--cores 1` the server has a core for itself, so that the clients' own work delays none of its answers.
At the end all is quiet for a while. The last line has the honest
clients' times, the answers by status, and the server's resident memory after each turn; a summary of it goes to stderr. It exits
with 1 where an answer is 500 or above, an honest client got none, or the server ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx2

from kvthaw.errors import KvthawError
from lab.script import Report, options, run_as_script

JSON = {"Content-Type": "application/json"}
LARGE = 1 << 20
"""Bytes of a large body."""
PATIENCE = 300.0
"""Seconds that a client waits for an answer."""
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
PHASES: dict[str, dict[str, Send]] = {"alone": {}, "refused": REFUSED, "served": REFUSED | SERVED}
"""What hostile clients send: nothing, what is refused, and all of it."""
SHARES = {"alone": 0.25, "refused": 0.375, "served": 0.375}
"""The phases' shares of the time."""
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


@dataclass
class Got:
    """What hostile clients got. answers: by kind; longest: seconds until the last of a kind came; cpu: seconds of their process."""

    answers: dict[str, Counter[str]] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0

    def add(self, kind: str, answers: Counter[str], longest: float) -> None:
        """Add answers of a kind."""
        self.answers[kind] = self.answers.get(kind, Counter[str]()) + answers
        self.longest[kind] = max(self.longest.get(kind, 0.0), longest)

    def __iadd__(self, other: Got) -> Got:
        for kind, answers in other.answers.items():
            self.add(kind, answers, other.longest[kind])
        self.cpu += other.cpu
        return self


async def hostile(client: httpx2.AsyncClient, kinds: dict[str, Send], ends: float, rng: random.Random, got: Got) -> None:
    """Send what is hostile, one after the other."""
    while (began := time.monotonic()) < ends:
        kind = rng.choice(list(kinds))
        try:
            said = str(await kinds[kind](client, rng) or "left")
        except httpx2.TransportError as error:
            said = type(error).__name__
        got.add(kind, Counter([said]), time.monotonic() - began)
        await asyncio.sleep(rng.uniform(0, 0.2))


def connected(url: str, key: str | None = None) -> httpx2.AsyncClient:
    """Return a client of the server with as many connections as it asks for."""
    headers = {} if key is None else bearer(key)
    return httpx2.AsyncClient(base_url=url, timeout=PATIENCE, limits=httpx2.Limits(max_connections=None), headers=headers)


def hostile_clients(url: str, phase: str, seconds: float, number: int, seed: str) -> Got:
    """Return what hostile clients got in a time. It runs in a process of its own, so that their work delays no honest client."""

    async def run() -> Got:
        got, ends = Got(), time.monotonic() + seconds
        async with connected(url, HOSTILE_KEY) as client:
            each = [random.Random(f"{seed} {place}") for place in range(number)]
            await asyncio.gather(*(hostile(client, PHASES[phase], ends, rng, got) for rng in each))
        return got

    began = time.process_time()
    got = asyncio.run(run())
    got.cpu = time.process_time() - began
    return got


def honest_clients(url: str, seconds: float, number: int) -> Noticed:
    """Return what honest clients noticed in a time."""

    async def run() -> Noticed:
        found, ends = Noticed(), time.monotonic() + seconds
        async with connected(url) as client:
            await asyncio.gather(*(honest(client, ends, place, found.seconds, found.answers) for place in range(number)))
        return found

    return asyncio.run(run())


async def ask_once(url: str) -> None:
    """Send each request that is served once: the server makes something at the first, such as kernels."""
    async with connected(url, HOSTILE_KEY) as client:
        for send in SERVED.values():
            await send(client, random.Random(0))


def resident(pid: int) -> int:
    """MiB of a process that are resident now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def cpu_seconds(pid: int) -> float:
    """Return the seconds of CPU time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(
    model: str, device: str, memory: int, cores: int, keys: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Serve a model to clients with API keys. Yields the process, and its URL once it takes requests. What it logs goes to stderr
    in the end.

    memory: bytes of address space that it may have on a CPU. CUDA reserves more than the machine has.
    cores: how many cores it has for itself, and the clients the rest; 0: all share all.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 0 <= cores < len(allowed):
        raise KvthawError(f"--cores is {cores}; it must be from 0 to {len(allowed) - 1}: the clients need one")
    sizes = ["--max-len", "2048", "--max-seqs", "8", "--prefix-memory", "1GB"]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+b") as log:
        (Path(folder) / "keys").write_text("\n".join(keys))
        files = ["--kv-dir", f"{folder}/kv", "--api-key-file", f"{folder}/keys"]
        command = [sys.executable, "-m", "kvthaw", "serve", model, "--port", "0", "--device", device, *sizes, *files]
        server = subprocess.Popen(command, stderr=log)
        if cores:
            os.sched_setaffinity(server.pid, allowed[:cores])
            os.sched_setaffinity(0, allowed[cores:])
        if device == "cpu":
            resource.prlimit(server.pid, resource.RLIMIT_AS, (memory, memory))
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


def measured(server: subprocess.Popen[bytes], url: str, given: argparse.Namespace, others: Executor) -> dict[str, Any]:
    """Return what honest clients see alone and beside hostile ones.

    others: the process of the hostile clients.
    """
    others.submit(hostile_clients, url, "refused", 0.0, given.hostile, "").result()  # it starts
    asyncio.run(ask_once(url))
    honest_clients(url, 3, given.honest)
    line: dict[str, Any] = {
        name: vars(given)[name] for name in ("seconds", "turns", "honest", "hostile", "model", "device", "cores")
    }
    before = resident(server.pid)
    noticed, got = {name: Noticed() for name in PHASES}, {name: Got() for name in PHASES}
    used, held = dict.fromkeys(PHASES, 0.0), list[int]()
    for turn in range(given.turns):  # what else the machine does changes, and is to change all three alike
        for name, kinds in PHASES.items():
            seconds, bad, began = (
                given.seconds * SHARES[name] / given.turns,
                given.hostile if kinds else 0,
                cpu_seconds(server.pid),
            )
            beside = others.submit(hostile_clients, url, name, seconds, bad, f"{given.seed} {turn}")
            found = honest_clients(url, seconds, given.honest)
            got[name] += beside.result()
            noticed[name].seconds += found.seconds
            noticed[name].answers += found.answers
            used[name] += cpu_seconds(server.pid) - began
        held.append(resident(server.pid))
    time.sleep(given.quiet)
    alone = noticed["alone"].percentile(99)
    for name, found in noticed.items():
        line |= {
            f"{name}_requests": len(found.seconds),
            f"{name}_p50_s": found.percentile(50),
            f"{name}_p99_s": found.percentile(99),
            f"{name}_p99_times": found.percentile(99) / alone,
            f"{name}_server_cpu_s": used[name],
            f"{name}_hostile_cpu_s": got[name].cpu,
        }
        for kind, longest in got[name].longest.items():
            print(f"{name}: {kind}: {dict(got[name].answers[kind])}, {longest:.2f} s at most", file=sys.stderr)
    line["honest_answers"] = dict(sum((found.answers for found in noticed.values()), Counter[str]()))
    line["hostile_answers"] = dict(sum((each for one in got.values() for each in one.answers.values()), Counter[str]()))
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
        device="cpu",
        cores=0,
        seed=0,
        out=Path,
        commit=str,
    )
    report = Report(given.out, given.commit)
    keys = [HOSTILE_KEY, *map(honest_key, range(given.honest))]
    with (
        served(given.model, given.device, given.memory_gib << 30, given.cores, keys) as (server, url),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as others,
    ):
        line = measured(server, url, given, others)
    report(line)
    print(summary(line), file=sys.stderr)
    failed = any(status.startswith("5") for status in line["hostile_answers"])
    sys.exit(bool(failed or set(line["honest_answers"]) != {"200"} or server.returncode))


if __name__ == "__main__":
    run_as_script(main)
