"""A headless Chromium, driven over a pipe by the DevTools protocol: no port, no driver.

Protocol: chromedevtools.github.io/devtools-protocol; ``--remote-debugging-pipe`` reads commands
from file descriptor 3 and writes to 4, each message JSON and ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_SECONDS = 300.0


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome, if there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@dataclass
class Tab:
    """One page; what it asked for and what went wrong gather while messages are read."""

    commands: int
    answers: int
    session: str = ""
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _seen: list[dict[str, Any]] = field(default_factory=list)
    _unread: bytes = b""
    _number: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result. Raises RuntimeError when it has none."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        return self._wait(method, lambda found: found.get("id") == self._number)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next event of that name, or one that came since the last navigation."""
        return self._wait(event, lambda found: found.get("method") == event)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression. Raises RuntimeError where it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def show(self, page: Path, width: int, scheme: str, height: int = 900, media: str = "") -> None:
        """Open a file at that width, in the reader's scheme ``light`` or ``dark``."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.requests.clear()
        self.problems.clear()
        self._seen.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def picture(self, path: Path) -> None:
        """The whole page, also what is below the window, as a PNG file."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _wait(self, what: str, wanted: Any) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        for message in self._messages(what, deadline):
            if wanted(message):
                if "error" in message:
                    raise RuntimeError(f"{what}: {message['error']}")
                result: dict[str, Any] = message.get("result", message.get("params", {}))
                return result
        raise RuntimeError(f"the browser ended before it answered {what}")

    def _messages(self, what: str, deadline: float) -> Iterator[Mapping[str, Any]]:
        yield from self._seen
        while True:
            while b"\0" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                    raise RuntimeError(f"no answer to {what} in {_SECONDS:g} seconds")
                part = os.read(self.answers, 1 << 16)
                if not part:
                    return
                self._unread += part
            text, _, self._unread = self._unread.partition(b"\0")
            message = json.loads(text)
            self._note(message)
            yield message

    def _note(self, message: dict[str, Any]) -> None:
        method, found = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(found["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(found["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(found["entry"]["text"])
        if method is not None:
            self._seen.append(message)


@contextmanager
def open_tab(chromium: str, profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, which ends with the block; ``profile`` is its folder."""
    their_end, commands = os.pipe()
    answers, their_other = os.pipe()
    words = [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    # It puts the pipes where Chromium looks for them, whatever numbers they have here.
    script = f'exec "$0" "$@" 3<&{their_end} 4>&{their_other}'
    process = subprocess.Popen(
        ["bash", "-c", script, *words],
        pass_fds=(their_end, their_other),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_end)
    os.close(their_other)
    try:
        tab = Tab(commands, answers)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        attached = tab.call("Target.attachToTarget", targetId=target, flatten=True)
        tab.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        yield tab
        tab.session = ""
        tab.call("Browser.close")
        process.wait(_SECONDS)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
