"""A headless Chromium, driven over a pipe by its own protocol: no packages are needed for it."""

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
OPTIONS += ["--remote-debugging-pipe", "--disable-background-networking", "--disable-component-update"]

# It reads at 3 and writes at 4.
START = """
import fcntl, os, sys
high = [fcntl.fcntl(int(place), fcntl.F_DUPFD, 100) for place in sys.argv[1:3]]
for place, file in enumerate(high, 3):
    os.dup2(file, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. `complaints` are what its console says: exceptions, refusals by the policy, missing files."""

    def __init__(self, path: str, profile: Path):
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        places = [str(to_read), str(to_write)]
        command = [sys.executable, "-c", START, *places, path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        try:
            self._attach()
        except BaseException:
            self._end()
            raise

    def _attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(answer["params"]["exceptionDetails"]))
            if answer.get("method") == "Log.entryAdded":
                self.complaints.append(answer["params"]["entry"]["text"])

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + 60
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Until an expression is true."""
        until = time.monotonic() + seconds
        while True:
            found = self.run(script)
            if found:
                return found
            assert time.monotonic() < until, f"never came true: {script}"
            time.sleep(0.03)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.before = true")
        self.call("Page.reload")
        self.wait("!window.before && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": "\r"} if key == "Enter" else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def close(self) -> None:
        self._session = ""
        try:
            self.call("Browser.close")
        finally:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
