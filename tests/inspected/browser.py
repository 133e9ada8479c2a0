"""A headless Chromium, driven through its debugging pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


class Browser:
    """One tab. errors: exceptions, refused resources and whatever the page wrote to the console."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._ids = write, read, b"", itertools.count(1)
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        os.write(self._write, json.dumps({"id": number, "method": method, "params": params, **self._session}).encode() + b"\0")
        while (said := self._next()).get("id") != number:
            if said.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                self.errors.append(json.dumps(said["params"]))
        assert "error" not in said, said["error"]
        return said["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            self._rest += os.read(self._read, 1 << 20)
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def show(self, url: str, width: int, height: int = 900, *, scheme: str = "light") -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Evaluate; waits for a promise."""
        said = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        script = f"""new Promise((done, fail) => {{
            const end = Date.now() + {1000 * seconds};
            const look = () => {{
                if ({condition}) done(true);
                else if (Date.now() > end) fail(new Error("it did not happen"));
                else setTimeout(look, 20);
            }};
            look();
        }})"""
        self.run(script)

    def key(self, name: str, code: int = 0) -> None:
        """Press a key. code: its number, without which the browser itself does nothing with it."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Browser]:
    to_child, from_us = os.pipe()
    to_us, from_child = os.pipe()

    def place() -> None:  # Chromium reads from 3 and writes to 4
        first, second = os.dup(to_child), os.dup(from_child)
        os.dup2(first, 3)
        os.dup2(second, 4)

    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=place,
        close_fds=False,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Browser(from_us, to_us)
    finally:
        process.terminate()
        process.wait()
        for end in (to_child, from_us, to_us, from_child):
            os.close(end)
