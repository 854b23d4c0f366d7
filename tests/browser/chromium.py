"""Headless Chromium over the DevTools protocol: open a page, wait for its content, read, shoot."""

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: no background traffic: the browser talks to this machine only
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-allow-origins=*",
    "--window-size=1500,1600",
)
_START_S = 60.0


class Page:
    """One tab."""

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=60)
        self._next = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command and wait for its answer; events are passed over."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == self._next:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def open(self, url: str) -> None:
        """Go to a page; what it shows comes later, see ``wait_for``."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self) -> str:
        """What a reader sees."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait_for(self, script: str, timeout_s: float = 60.0) -> Any:
        """Poll an expression until it is true; on timeout fail with what the page shows."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.2)
        raise AssertionError(
            f"{script} is not true after {timeout_s} s; page: {self.text()[:2000]}"
        )

    def shoot(self, path: Path) -> None:
        """Save a screenshot."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """Let go of the tab."""
        self._socket.close()


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser with one tab; ends with the block. ``folder``: its profile."""
    assert CHROMIUM is not None, "chromium is not installed: apt-get install chromium"
    log = (folder / "chromium.log").open("wb")
    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}/profile",
         "about:blank"],
        stdout=log,
        stderr=log,
    )  # fmt: skip
    try:
        port = _port(folder / "profile" / "DevToolsActivePort", process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
            tabs = json.load(answer)
        page = Page(next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"])
        page.call("Page.enable")
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def _port(file: Path, process: "subprocess.Popen[bytes]") -> int:
    """The debugging port that the browser chose."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"chromium ended with {process.returncode}"
        lines = file.read_text().splitlines() if file.exists() else []
        if lines:
            return int(lines[0])
        time.sleep(0.1)
    raise AssertionError(f"chromium did not start within {_START_S} s")
