"""A headless Chromium, driven through chromedriver's HTTP interface, and a TensorBoard server.

Interface: https://www.w3.org/TR/webdriver2/. The few commands that are needed are plain HTTP, so no client library is.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")

CHROMIUM_ARGS = [
    "--headless",
    "--no-sandbox",  # a container has no user namespace for it; the only page that is opened is our own
    "--disable-gpu",
    "--disable-dev-shm-usage",  # /dev/shm of a container holds 64 MB
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--proxy-server=direct://",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing but loopback is reached
]

PAGE_TEXT = """
const parts = [];
const walk = node => {
    if (node.nodeType === Node.TEXT_NODE) parts.push(node.textContent);
    if (["STYLE", "SCRIPT", "NOSCRIPT", "TEMPLATE"].includes(node.nodeName)) return;
    if (node instanceof Element && getComputedStyle(node).display === "none") return;
    if (node.shadowRoot) node.shadowRoot.childNodes.forEach(walk);
    const inner = node.nodeName === "IFRAME" && node.contentDocument;
    if (inner && inner.body) walk(inner.body);
    node.childNodes.forEach(walk);
};
walk(document.body);
return parts.join(" ").replace(/\\s+/g, " ");
"""


class Page:
    """One browser window."""

    def __init__(self, session_url: str) -> None:
        self.session_url = session_url

    def open(self, url: str) -> None:
        """Load `url` afresh, also where it differs from the current one in its fragment only."""
        self._command("POST", "/url", url="about:blank")
        self._command("POST", "/url", url=url)

    def text(self) -> str:
        """All text that the page displays, shadow roots and frames included."""
        return self._command("POST", "/execute/sync", script=PAGE_TEXT, args=[])

    def wait_for(self, *words: str, timeout_s: float = 60) -> str:
        """Return the page's text as soon as it contains all `words`. Raises TimeoutError with the text that is
        there."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text()
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            if time.monotonic() > deadline:
                raise TimeoutError(f"the page did not show {missing} within {timeout_s} s; it shows: {text}")
            time.sleep(0.2)

    def run(self, script: str, *args: Any) -> Any:
        """Run the body of a JavaScript function in the page and return its result."""
        return self._command("POST", "/execute/sync", script=script, args=list(args))

    def screenshot(self, path: Path) -> None:
        """Save what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._command("GET", "/screenshot")))

    def _command(self, method: str, path: str, **body: Any) -> Any:
        return _request(method, self.session_url + path, body if method == "POST" else None)


@contextmanager
def open_browser(width: int = 1280, height: int = 900) -> Iterator[Page]:
    """Start Chromium with a fresh profile; gone, with all its processes, on leaving."""
    if CHROMIUM is None or CHROMEDRIVER is None:
        raise RuntimeError("Chromium and its driver are needed (Debian: apt-get install chromium chromium-driver)")
    with tempfile.TemporaryDirectory() as profile, _process([CHROMEDRIVER, "--port=0"], r"on port (\d+)\.") as port:
        arguments = [*CHROMIUM_ARGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        capabilities = {"browserName": "chrome", "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments}}
        session = _request("POST", f"http://127.0.0.1:{port}/session", {"capabilities": {"alwaysMatch": capabilities}})
        url = f"http://127.0.0.1:{port}/session/{session['sessionId']}"
        try:
            yield Page(url)
        finally:
            _request("DELETE", url)


@contextmanager
def open_tensorboard(log_dir: Path) -> Iterator[str]:
    """Serve `log_dir` on loopback, on a port that is free; yields the address."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(log_dir), "--host", "127.0.0.1", "--port", "0"]
    with _process(command, r"at (http://127\.0\.0\.1:\d+/)") as url:
        yield url


@contextmanager
def _process(command: list[str], ready: str, timeout_s: float = 60) -> Iterator[str]:
    """Run `command` until the block is left; yields the first group of `ready` as found in its output."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield _wait_for_output(process, output, ready, timeout_s)
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # its children too: they share the new session's group
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_for_output(process: subprocess.Popen, output: TextIO, ready: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while True:
        ended = process.poll() is not None or time.monotonic() > deadline
        output.seek(0)
        text = output.read()
        if match := re.search(ready, text):
            return match[1]
        if ended:
            raise RuntimeError(f"{' '.join(process.args)} was not ready within {timeout_s} s; it printed:\n{text}")
        time.sleep(0.05)


def _request(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback is never behind a proxy
    with opener.open(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method), timeout=60
    ) as response:
        return json.load(response)["value"]
