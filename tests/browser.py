"""A headless browser for tests, over the Chrome DevTools Protocol: pages are opened, used and looked at.

The browser is the file that CHROME_PATH names, or an installed Chrome or Chromium.
"""

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
_OPTIONS = (
    "--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--disable-background-networking",
)  # fmt: skip
# For WebGPU on the CPU.
WITH_WEBGPU = (
    *(option for option in _OPTIONS if option != "--disable-gpu"), "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan",
)  # fmt: skip
# Seconds without a message after which the browser hangs.
_PATIENCE = 90.0


class Page:
    """One page of the browser."""

    def __init__(self, requests: int, answers: int):
        self._requests, self._answers = requests, answers
        self._number, self._rest, self._session = 0, b"", ""
        self._results: dict[int, dict[str, Any]] = {}
        self.problems: list[str] = []
        """Errors of the page's scripts, and messages of level error or warning on its console."""
        self.served: dict[str, pathlib.Path] = {}
        """Files that answer requests whose address begins with the key, instead of the network."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM", "Network"):
            self.send(f"{domain}.enable")
        self.send("Network.setCacheDisabled", cacheDisabled=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._write(message | ({"sessionId": self._session} if self._session else {}))
        number = self._number
        while number not in self._results:  # an event may itself send a command, which waits for its result here too
            received = self._read()
            if "id" in received:
                self._results[received["id"]] = received
            else:
                self._notice(received)
        answer = self._results.pop(number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, address: str, width: int = 1280, height: int = 800) -> None:
        """Open an address in a window of this size in pixels, and wait until it is loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        if self.served:
            self.send("Fetch.enable", patterns=[{"urlPattern": f"{start}*"} for start in self.served])
        self.send("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """Value of an expression, or of the promise that it is."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        script = (
            f"new Promise(resolve => {{ const end = Date.now() + {1000 * seconds}; (function look() {{ "
            f"if ({condition}) resolve(true); else if (Date.now() > end) resolve(false); "
            "else setTimeout(look, 20); })(); })"
        )
        assert self.evaluate(script), f"not within {seconds} seconds: {condition}; {self.problems}"

    def choose(self, selector: str, file: pathlib.Path) -> None:
        """Choose a file in an input element, as its dialog does."""
        document = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def drop(self, selector: str, file: pathlib.Path) -> None:
        """Drop a file on an element."""
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.send("Input.dispatchDragEvent", type=kind, x=box[0], y=box[1], data=data)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return self.evaluate("document.documentElement.scrollWidth - innerWidth")

    def _notice(self, event: Mapping[str, Any]) -> None:
        """Answer a request for a file of `served`, and keep errors."""
        content = event.get("params", {})
        if event.get("method") == "Fetch.requestPaused":
            self._answer(content["requestId"], content["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(content["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and content["entry"]["level"] == "error":
            self.problems.append(f"{content['entry']['text']} {content['entry'].get('url')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and content["type"] in ("error", "warning"):
            self.problems.append(str(content["args"]))

    def _answer(self, request: str, address: str) -> None:
        start, folder = next((start, folder) for start, folder in self.served.items() if address.startswith(start))
        file = folder / address.removeprefix(start)
        types = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm"}
        headers = {"Content-Type": types.get(file.suffix, "text/plain"), "Access-Control-Allow-Origin": "*"}
        self.send(
            "Fetch.fulfillRequest",
            requestId=request,
            responseCode=200 if file.is_file() else 404,
            responseHeaders=[{"name": name, "value": value} for name, value in headers.items()],
            body=base64.b64encode(file.read_bytes() if file.is_file() else b"").decode(),
        )

    def _write(self, message: Mapping[str, Any]) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._requests, rest) :]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], _PATIENCE)
            part = os.read(self._answers, 2**20) if ready else b""
            assert part, f"no answer from the browser; {self.problems}"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


def find_browser() -> str:
    """The browser; skips the test where there is none."""
    found = os.environ.get("CHROME_PATH") or next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("No Chrome or Chromium is installed; set CHROME_PATH to its program.")
    return found


@contextlib.contextmanager
def open_browser(options: Sequence[str] = _OPTIONS) -> Iterator[Page]:
    """Start a headless browser with an empty profile and one page."""
    program = find_browser()
    (from_us, requests), (answers, to_us) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads commands from descriptor 3 and writes answers to 4.
        command = f'exec 3<&{from_us} 4>&{to_us}; exec "$0" "$@"'
        browser = subprocess.Popen(
            ["bash", "-c", command, program, *options, f"--user-data-dir={profile}"],
            pass_fds=(from_us, to_us),
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            yield Page(requests, answers)
        finally:
            os.close(requests)
            os.close(answers)
            browser.kill()
            browser.wait()
