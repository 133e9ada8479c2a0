"""The server as a Ray Serve application: replicas behind an ingress that sends sessions and documents to the replica that has them.

An ingress reads each request and hashes its session or first characters, which requests with common KV share. It forwards
the request through Ray's consistent-hash router to a replica, a whole server without a socket. Replicas share only the
folder of kept documents.

    pip install 'kvthaw[serve]' 'ray[serve]>=2.60'
    python examples/ray_serve.py model=MODEL replicas=1:4 kv_dir=/shared/documents     (serves until SIGTERM or Ctrl-C)
    serve run examples.ray_serve:app model=MODEL replicas=1:4                         (the same by Ray's own command)
    python examples/ray_serve.py                                                      (answers one question and ends)
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvthaw.errors import ConfigError, KvthawError
from kvthaw.serve.errors import ApiError

if TYPE_CHECKING:
    from kvthaw.serve.service import Service

NAME = "kvthaw"
"""Of the application on the cluster."""
FIRST_BLOCK = 2048
"""First characters of a prompt that route it if the client names no session; about 512 tokens."""
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_SENT = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
)
"""What an ingress forwards of a scope."""
_STREAM = b"text/event-stream"
_log = logging.getLogger(__name__)


def routing_key(path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Return a digest of what requests have in common that one replica is to answer, "" where any may.

    That is the session, the header x-session-id; else the name of a context; else the prompt's first block, no more of a
    conversation than its first user's turn, so that the turns to come have the same key.
    """
    try:
        shared = _shared(path, headers.get("x-session-id"), json.loads(body or "{}"))
    except (ValueError, RecursionError):  # a replica says what is wrong
        shared = None
    return "" if shared is None else hashlib.blake2b(shared.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _shared(path: str, session: str | None, body: Any) -> str | None:
    if session:
        return f"session {session}"
    fields = body if isinstance(body, dict) else {}
    if path.startswith("/v1/contexts"):
        return f"context {path.removeprefix('/v1/contexts').strip('/') or fields.get('name')}"
    if name := fields.get("context") or fields.get("kv_name"):
        return f"context {name}"
    prompt = next((fields[field] for field in ("prompt", "messages", "input") if fields.get(field)), None)
    return None if prompt is None else f"prompt {fields.get('cache_salt')} {_beginning(prompt)}"


def _beginning(prompt: Any) -> str:
    if isinstance(prompt, list) and isinstance(prompt[0], list | str):
        prompt = prompt[0]  # of several
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        turns = [each.get("role") if isinstance(each, dict) else None for each in prompt]
        prompt = json.dumps(prompt[: turns.index("user") + 1 if "user" in turns else 1])
    elif isinstance(prompt, list):
        prompt = str(prompt[: FIRST_BLOCK // 4])
    return str(prompt)[:FIRST_BLOCK]


class Replica:
    """A server for the requests that an ingress forwards."""

    async def __init__(self, build: Callable[[], Service], api_keys: Sequence[str]) -> None:  # type: ignore[misc]  # Ray waits
        from ray.serve import get_replica_context

        from kvthaw.serve.app import create_app  # not on an ingress: it needs torch

        self.id = get_replica_context().replica_id.unique_id
        self._service = build()
        self._app = create_app(self._service, api_keys=api_keys)
        self._service.worker.start()

    def check_health(self) -> None:
        """Raise if the model has failed; Ray then starts another replica."""
        if self._service.worker.failure is not None:
            raise KvthawError(f"the model failed: {self._service.worker.failure}")

    async def drain(self, grace: float) -> None:
        """Accept no more requests, and save their prompts. After `grace` seconds, end the remaining requests with "abort"."""
        worker, ends = self._service.worker, time.monotonic() + grace
        worker.draining = True
        while self._service.busy and time.monotonic() < ends:
            await asyncio.sleep(0.1)
        worker.abort()

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the app's answer to a request, all available messages at a time."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return coming.pop() if coming else await asyncio.Future()  # a client that leaves cancels all of this

        task = asyncio.create_task(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while not task.done() or not messages.empty():
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                yield [self._signed(message) for message in ready if message is not None]
            if (error := task.exception()) is not None:
                _log.error("a request failed", exc_info=error)  # its client got the error
        finally:
            task.cancel()

    async def whole(self, scope: Scope, body: bytes) -> tuple[str, int, bytes]:
        """Return this replica's id, and the status and the body of its answer."""
        messages = [message async for some in self.answer(scope, body) for message in some]
        return self.id, messages[0]["status"], b"".join(message.get("body", b"") for message in messages)

    def _signed(self, message: Message) -> Message:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"x-replica-id", self.id.encode())]
        return message


class Ingress:
    """Forward requests to replicas.

    most_bytes: most bytes of a body to forward. A replica rejects a longer body.
    """

    def __init__(self, replicas: Any, most_bytes: int) -> None:
        self._replicas, self._most_bytes = replicas.options(stream=True), most_bytes

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(routes=[Mount("", app=self._forward)])

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        while len(body) <= self._most_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        sent = {name: scope[name] for name in _SENT if name in scope}
        if scope["method"] == "GET" and (path in ("/metrics", "/v1/contexts") or path.startswith("/v1/recalls/")):
            together = await self._all(path, sent)
            await together(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        replicas = self._replicas.options(session_id=routing_key(path, headers, bytes(body)))
        await _relay(replicas.answer.remote(sent, bytes(body)), scope, receive, send)

    async def _all(self, path: str, scope: Scope) -> Response:
        """Return one answer that merges the answers of all replicas."""
        answers = await self._replicas.broadcast("whole", scope, b"").results_async(return_exceptions=True)
        answers = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not answers:
            return _away().response()
        _, status, body = min(answers, key=lambda answer: answer[1])
        if status == 200 and path == "/metrics":
            return Response(merged_metrics({each: text.decode() for each, code, text in answers if code == 200}))
        if status == 200 and path == "/v1/contexts":
            cards = {card["id"]: card for _, code, text in answers if code == 200 for card in json.loads(text)["data"]}
            return JSONResponse({"object": "list", "data": [cards[name] for name in sorted(cards)]})
        return Response(body, status, media_type="application/json")


async def _relay(answer: AsyncIterator[list[Message]], scope: Scope, receive: Receive, send: Send) -> None:
    """Send an answer. If its replica dies, send an error, within the stream if there is one."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError, RayServeException

    start: Message | None = None
    try:
        async for messages in answer:
            for message in messages:
                start = start or message
                await send(message)
    except BackPressureError:
        error = ApiError(429, "all replicas are full", code="rate_limit_exceeded", headers={"Retry-After": "1"})
        await error.response()(scope, receive, send)
    except (RayError, RayServeException) as error:
        _log.warning("a replica did not answer: %s", error)
        if start is None:
            await _away().response()(scope, receive, send)
        elif any(name == b"content-type" and value.startswith(_STREAM) for name, value in start["headers"]):
            event = b"data: " + json.dumps(_away().body()).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": event})
        else:
            raise


def _away() -> ApiError:
    return ApiError(503, "the replica went away; try again", code="replica_unavailable", headers={"Retry-After": "1"})


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Return the metrics of all replicas in Prometheus' text format, with a label for the replica."""
    families: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP"):
                family = families.setdefault(line, [])
            elif not line.startswith("#"):
                family.append(line.replace("{", f'{{replica="{replica}",', 1))
            elif line not in family:
                family.append(line)
    return "".join(f"{line}\n" for help, family in families.items() for line in (help, *family))


def application(
    build: Callable[[], Service],
    *,
    max_seqs: int = 8,
    max_waiting: int = 64,
    replicas: tuple[int, int] = (1, 1),
    num_gpus: float = 1,
    num_cpus: float = 1,
    grace: float = 30,
    api_keys: Sequence[str] = (),
    upscale_delay: float = 30,
) -> Any:
    """Return an application for `ray.serve.run` and `serve build`.

    build: called in a replica's process, returns its service with these max_seqs and max_waiting.
    replicas: fewest and most replicas. Ray adds one after more than max_seqs requests per replica were open for
        upscale_delay seconds.
    num_gpus, num_cpus: resources of a replica.
    grace: seconds for requests to finish before a replica ends.
    api_keys: see `create_app`.
    """
    from ray import cloudpickle, serve

    from kvthaw.serve.guard import MOST_BYTES

    if __name__ != "__main__":
        cloudpickle.register_pickle_by_value(sys.modules[__name__])  # replicas on other machines need no copy of this file
    least, most = replicas
    if not 1 <= least <= most:
        raise ConfigError(f"replicas is {least}:{most}; it must be at least 1, and the least no more than the most")
    room = max_seqs + max_waiting
    shared = {
        "graceful_shutdown_timeout_s": grace,
        "graceful_shutdown_wait_loop_s": min(1.0, max(grace, 0.1)),
        "max_constructor_retry_count": 3,
    }
    bounds = {"min_replicas": least, "max_replicas": most, "upscale_delay_s": upscale_delay}
    servers = serve.deployment(
        Replica,
        max_ongoing_requests=room,  # one that is full is passed over
        max_queued_requests=max(1, max_waiting),
        autoscaling_config=bounds | {"target_ongoing_requests": max_seqs},
        request_router_config={"request_router_class": _ROUTER},
        ray_actor_options={"num_gpus": num_gpus, "num_cpus": num_cpus},
        **shared,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        max_ongoing_requests=1 << 16,  # replicas say when they are full
        autoscaling_config=bounds | {"min_replicas": 1, "target_ongoing_requests": 4 * room},
        ray_actor_options={"num_cpus": 0},
        **shared,
    )
    return ingress.bind(servers.bind(build, tuple(api_keys)), MOST_BYTES)


def app(given: Mapping[str, str]) -> Any:
    """Return the application of some settings, for the cluster at hand or a local one.

    A replica gets a GPU, if there are any and device is not "cpu", and its share of the cores.

    given: settings as text. replicas is "2", or the least and the most, "1:4"; grace is as for `application`, and so is api_keys,
        a JSON list; all others are of `kvthaw.serve.build.build`, such as model, method and max_seqs.

    Raises ConfigError, before Ray starts, for a setting that none of them takes.
    """
    from kvthaw.config import SETTINGS
    from kvthaw.serve.build import build

    known = {*inspect.signature(build).parameters, *SETTINGS, "replicas", "grace", "api_keys"} - {"progress", "settings"}
    if wrong := sorted(set(given) - known):
        raise ConfigError(f"{', '.join(wrong)}: no such setting; there are {', '.join(sorted(known))}")
    import ray

    settings: dict[str, Any] = {"max_seqs": 8, "max_waiting": 64} | {name: _value(text) for name, text in given.items()}
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    if "kv_dir" in settings:
        settings["kv_dir"] = Path(settings["kv_dir"]).expanduser().absolute()  # replicas have other working directories
    if (folder := Path(settings.get("model", "shipped")).expanduser()).is_dir():
        settings = {"name": folder.absolute().name} | settings | {"model": str(folder.absolute())}
    least, _, most = str(settings.pop("replicas", 1)).partition(":")
    sizes = {name: settings[name] for name in ("max_seqs", "max_waiting")}
    sizes |= {"grace": settings.pop("grace", 30), "api_keys": settings.pop("api_keys", ())}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shares = [node.get("CPU", 0) // node["GPU"] for node in nodes if node.get("GPU") and settings.get("device") != "cpu"]
    share = min(shares) if shares else max(node.get("CPU", 0) for node in nodes) // int(most or least)
    resources = {"num_gpus": min(1, len(shares)), "num_cpus": max(1, share)}
    return application(partial(build, **settings), replicas=(int(least), int(most or least)), **sizes, **resources)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(given: Mapping[str, str]) -> None:
    """Serve until SIGTERM or Ctrl-C, on the cluster that this process belongs to or finds, or on a local one.

    given: see `app`; also host and port, 127.0.0.1 and 8000 unless the cluster serves something already.
    """
    import ray
    from ray import serve

    joined, (host, port) = ray.is_initialized(), (given.get("host", "127.0.0.1"), int(given.get("port", 8000)))
    made, ended = app({name: text for name, text in given.items() if name not in ("host", "port")}), threading.Event()

    def end(*_: object) -> None:
        if ended.is_set():
            raise KeyboardInterrupt
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)  # after Ray's own, which ends the process at once
    try:
        serve.start(http_options={"host": host, "port": port})
        try:
            serve.run(made, name=NAME)
            print("serving with Ray", flush=True)
            ended.wait()
            replicas = serve.get_deployment_handle(Replica.__name__, NAME)
            replicas.broadcast("drain", _value(given.get("grace", "30"))).results(return_exceptions=True)
        finally:
            serve.delete(NAME)
    finally:
        if not joined:
            ray.shutdown()


def ask_once() -> None:
    """Answer one question with the model that ships, and end."""
    from ray import serve

    shipped = {"model": "shipped", "method": "icecache-digest", "budget": "256", "max_len": "4096", "max_seqs": "4"}
    serve.run(app(shipped | {"replicas": "1:4"}), name=NAME)
    prompt = "The pass key is 12345. Remember it. What is the pass key? The pass key is"
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", "x-session-id": "a user"}  # what follows it goes to the same replica
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        print(f"replica {answer.headers['x-replica-id']}: {json.load(answer)['choices'][0]['text']}")
    serve.shutdown()


if __name__ == "__main__":
    settings = dict(each.split("=", 1) for each in sys.argv[1:])
    if settings:
        try:
            run(settings)
        except ConfigError as error:
            sys.exit(f"kvthaw: {error}")
    else:
        ask_once()
