"""A page on 127.0.0.1 that answers for the picture that is dropped on it. Only this machine can reach it."""

import http.server
import threading
import urllib.parse
from typing import Protocol

from keras_vit import UserError
from keras_vit.errors import explained
from keras_vit.pages import render
from training.options.predict import HOST

# Largest request in bytes.
_LARGEST = 64 * 2**20
_HOSTS = (HOST, "localhost")


class PictureAnswerer(Protocol):
    """What the page shows of a picture."""

    def answer(self, data: bytes, name: str) -> str:
        """HTML text for the bytes of a picture. Raises UserError if they are none."""
        ...


def open_server(
    model: PictureAnswerer, port: int, title: str = "Classify a picture"
) -> http.server.ThreadingHTTPServer:
    """Return the server of the page; `serve_forever` answers requests. With port 0 the system chooses one.

    Raises UserError if the port is in use.
    """
    one_at_a_time = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._is_from_elsewhere():
                self._answer(403, "Open this page as http://127.0.0.1.")
            elif self.path != "/":
                self._answer(404, "There is one page, at /.")
            else:
                self._answer(200, render("drop", title=title, largest=_LARGEST))

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "")
            if self._is_from_elsewhere():
                self._answer(403, "Open this page as http://127.0.0.1.")
                return
            if not length.isdecimal() or int(length) > _LARGEST:
                self._answer(413, f"A picture has at most {_LARGEST // 2**20} MB.")
                return
            data = self.rfile.read(int(length))
            name = urllib.parse.unquote(self.headers.get("X-Name", "picture"))
            try:
                with one_at_a_time:
                    page = model.answer(data, name)
                self._answer(200, page)
            except UserError as error:
                self._answer(422, str(error))

        def _is_from_elsewhere(self) -> bool:
            """Whether the request uses another name for this machine, as a foreign page in the browser might."""
            return self.headers.get("Host", "").rsplit(":", 1)[0] not in _HOSTS

        def _answer(self, status: int, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"text/{'html' if status == 200 else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args) -> None:
            """Print nothing for each request."""

    with explained(lambda why: f"Port {port} cannot be used ({why}); give another --port, or 0 for any.", OSError):
        return http.server.ThreadingHTTPServer((HOST, port), Handler)
