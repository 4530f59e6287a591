"""A browser to look at pages with: Chromium, driven through a pipe by its DevTools protocol.

The protocol is JSON, a zero byte after every message, so that no package is needed.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# Chromium reads commands from file 3 and answers on file 4; the two may stand there crosswise
AS_3_AND_4 = """
import fcntl, os, sys
read, write, program, *options = sys.argv[1:]
away = [fcntl.fcntl(int(file), fcntl.F_DUPFD, 10) for file in (read, write)]
for file, place in zip(away, (3, 4)):
    os.dup2(file, place)
os.execv(program, [program, *options])
"""
DEADLINE = 60  # seconds, for a machine with other work


class Browser:
    """One window. A command that takes longer than the deadline ends the browser, and so the test.

    Args:
        folder: an empty one, for the browser's profile and for downloads.
    """

    def __init__(self, folder: Path) -> None:
        self.downloads = folder / "downloads"
        self._numbers = itertools.count(1)
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        files = [str(commands), str(answers)]
        profile = f"--user-data-dir={folder / 'profile'}"
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", AS_3_AND_4, *files, PROGRAM, *OPTIONS, profile],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._received = b""
        self._session = None
        self.events: list[dict] = []

    def __enter__(self) -> "Browser":
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._session = None
        try:
            # asked to, it ends with its children, who write to the profile to the last
            self.call("Browser.close")
            self._process.wait(timeout=10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters) -> dict:
        """Send a command and wait for its answer; events on the way are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        watch = threading.Timer(DEADLINE, self._process.kill)
        watch.start()
        try:
            while (answer := self._next()).get("id") != number:
                self.events.append(answer)
        finally:
            watch.cancel()
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._received:
            some = os.read(self._answers, 1 << 16)
            assert some, "the browser has ended"
            self._received += some
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of this size, a phone with a finger where it is narrow."""
        is_phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.downloads.mkdir(exist_ok=True)
        where = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self.call("Page.setDownloadBehavior", **where)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")
        self.frame()

    def run(self, script: str):
        """The value of an expression, or of the promise that it is."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the expression is true; the deadline of a command is that of waiting, too."""
        self.run(f"""new Promise((resolve) => {{
            const look = () => ({condition}) ? resolve(true) : setTimeout(look, 5);
            look();
        }})""")

    def frame(self) -> None:
        """Let the page draw what it has asked for, which it does first in the same frame."""
        self.run("new Promise(requestAnimationFrame)")

    def text(self, selector: str) -> str:
        """The text of an element as a reader gets it, in one line."""
        return " ".join(
            self.run(f"document.querySelector({json.dumps(selector)}).innerText").split()
        )

    def point(self, x: float, y: float, press: bool = False) -> None:
        """Move the mouse there, and click."""
        at = {"x": x, "y": y, "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        if press:
            self.call("Input.dispatchMouseEvent", type="mousePressed", **at)
            self.call("Input.dispatchMouseEvent", type="mouseReleased", **at)
        self.frame()

    def tap(self, x: float, y: float) -> None:
        """With a finger."""
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        self.frame()

    def press(self, key: str, shift: bool = False) -> None:
        """A key, where the focus is."""
        event = {"key": key, "modifiers": 8 if shift else 0}
        if key == "Enter":
            event |= {"text": "\r", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)
        self.frame()

    def downloaded(self) -> Path:
        """The one file that the page has put on the disk, once it is whole."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            names = [path for path in self.downloads.iterdir() if path.suffix != ".crdownload"]
            if names and names[0].stat().st_size:
                return names[0]
            time.sleep(0.01)
        raise AssertionError("nothing was downloaded")

    def errors(self) -> list[str]:
        """What the page has thrown, logged as an error or was refused since it was opened."""
        said = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                said.append(str(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                if entry["level"] == "error":
                    said.append(str(entry))
        return said
