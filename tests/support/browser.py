"""A headless Chromium, driven through chromedriver by the WebDriver protocol (W3C): what a page does in a browser."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DRIVER = "chromedriver"
KEYS = {"ArrowLeft": "\ue012", "ArrowRight": "\ue014", "Home": "\ue011", "End": "\ue010"}

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


def missing() -> str:
    """Return what a browser test lacks here, or an empty text."""
    if not any(map(shutil.which, BROWSERS)):
        return "no chromium on PATH"
    return "" if shutil.which(DRIVER) else "no chromedriver on PATH"


class Browser:
    """One window of a browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, file: Path) -> None:
        """Open a file of this machine."""
        self._post("url", url=file.as_uri())

    def resize(self, width: int, height: int) -> None:
        """Make the window's content about this large, in CSS pixels."""
        self._post("window/rect", width=width, height=height)

    def run(self, script: str, *args: Any) -> Any:
        """Return what a script (the body of a function) returns."""
        return self._post("execute/sync", script=script, args=[*args])

    def press(self, selector: str, *keys: str) -> None:
        """Focus an element and type."""
        self.run("document.querySelector(arguments[0]).focus()", selector)
        downs = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("actions", actions=[{"type": "key", "id": "keys", "actions": downs}])

    def point(self, selector: str, share: float) -> None:
        """Move the pointer over an element, to this share of its width."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector)
        box = self.run("return document.querySelector(arguments[0]).getBoundingClientRect().toJSON()", selector)
        move = {"type": "pointerMove", "x": round(box["x"] + share * box["width"]), "y": round(box["y"] + 50)}
        self._post("actions", actions=[{"type": "pointer", "id": "mouse", "actions": [move]}])

    def click(self, selector: str) -> None:
        """Click on an element as a script does."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def console(self) -> list[str]:
        """Return the messages of the console since the last call, errors of the page among them."""
        return [entry["message"] for entry in self._post("se/log", type="browser")]

    def requests(self) -> list[str]:
        """Return the addresses that pages from files have requested since the last call, their own among them."""
        events = [json.loads(one["message"])["message"] for one in self._post("se/log", type="performance")]
        sent = [one["params"] for one in events if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if one["documentURL"].startswith("file:")]

    def _post(self, command: str, **body: Any) -> Any:
        return _call(f"{self._session}/{command}", body)


@contextmanager
def browser(scratch: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own below ``scratch``, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (scratch / "chromedriver.log").open("wb")
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        _until_ready(address)
        options = {
            "binary": next(filter(None, map(shutil.which, BROWSERS))),
            "args": [*_FLAGS, f"--user-data-dir={scratch / 'profile'}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = _call(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(f"{address}/session/{session}")
        finally:
            _call(f"{address}/session/{session}", None)
    finally:
        driver.terminate()
        driver.wait(30)
        log.close()


def _until_ready(address: str) -> None:
    for _ in range(600):
        try:
            _ = urlopen(f"{address}/status", timeout=5).read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("chromedriver does not answer")


def _call(address: str, body: dict[str, Any] | None) -> Any:
    """Post ``body``, or delete without one, and return the value of the answer."""
    data = None if body is None else json.dumps(body).encode()
    method = "DELETE" if body is None else "POST"
    request = Request(address, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except HTTPError as error:
        raise RuntimeError(f"{address}: {error.read().decode()}") from error
