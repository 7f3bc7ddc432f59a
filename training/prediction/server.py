"""A page on 127.0.0.1 that answers for the image that is dropped on it. Only this machine can reach it.

Waitress keeps clients that are slow, silent or many from taking threads or memory: a request reaches `_Page` when it is
complete, and a large one lies in a temporary file until then.
"""

import json
import logging
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import waitress.channel
import waitress.parser
import waitress.server

from keras_vit import UserError
from keras_vit.cli.pages import render
from keras_vit.errors import explained
from training.options.predict import HOST

# Maximum size of a request in bytes.
_LARGEST = 64 * 2**20
_HOSTS = (HOST, "localhost")
# Connections at a time, and seconds after which a silent one is closed.
_CONNECTIONS, _SILENCE = 64, 10
_LONGEST_NAME = 300
_REASONS = {200: "OK", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed", 422: "Unprocessable Content"}


class ImageAnswerer(Protocol):
    """Answers for the bytes of an image: a page, or values for a program. Raises UserError for bytes that are none."""

    def answer(self, data: bytes, name: str) -> str: ...

    def values(self, data: bytes, name: str) -> dict[str, Any]: ...


class _Page:
    """The page as a WSGI application. One image is decoded at a time, so memory is bounded by the largest one."""

    def __init__(self, model: ImageAnswerer, title: str) -> None:
        self._model, self._title = model, title
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        for_program = "application/json" in environ.get("HTTP_ACCEPT", "")
        status, text = self._answer(environ, for_program=for_program)
        kind = "application/json" if for_program else "text/html" if status == 200 else "text/plain"
        if for_program and status != 200:
            text = json.dumps({"error": text})
        start_response(f"{status} {_REASONS[status]}", [("Content-Type", f"{kind}; charset=utf-8")])
        return [text.encode()]

    def _answer(self, environ: dict[str, Any], *, for_program: bool) -> tuple[int, str]:
        host = environ.get("HTTP_HOST", "")
        # A foreign page in the browser uses another name for this machine, or says where it is from.
        if host.rsplit(":", 1)[0] not in _HOSTS or environ.get("HTTP_ORIGIN", f"http://{host}") != f"http://{host}":
            return 403, f"Open this page as http://{HOST}."
        if environ["PATH_INFO"] != "/":
            return 404, "There is one page, at /."
        if environ["REQUEST_METHOD"] == "GET":
            return 200, render("drop", title=self._title, largest=_LARGEST)
        if environ["REQUEST_METHOD"] != "POST":
            return 405, "Send an image by POST."
        name = urllib.parse.unquote(environ.get("HTTP_X_NAME", "image")[: 3 * _LONGEST_NAME])[:_LONGEST_NAME]
        try:
            with self._one_at_a_time:
                data = environ["wsgi.input"].read()
                if for_program:
                    return 200, json.dumps(self._model.values(data, name))
                return 200, self._model.answer(data, name)
        except UserError as error:
            return 422, str(error)


class _Parser(waitress.parser.HTTPRequestParser):
    def parse_header(self, header_plus: bytes) -> None:
        try:
            super().parse_header(header_plus)
        except ValueError as error:  # of a length with more digits than Python converts
            raise waitress.parser.ParsingError("Content-Length is invalid") from error


class _Channel(waitress.channel.HTTPChannel):
    parser_class = _Parser


def open_server(model: ImageAnswerer, port: int, title: str = "Classify an image") -> waitress.server.TcpWSGIServer:
    """Return the server of the page; `run` answers requests. With port 0 the system chooses `effective_port`.

    Raises UserError if the port is in use.
    """
    with explained(lambda why: f"Port {port} cannot be used ({why}); give another --port, or 0 for any.", OSError):
        listener = socket.create_server((HOST, port))
    server = waitress.create_server(
        _Page(model, title),
        sockets=[listener],
        channel_timeout=_SILENCE,
        cleanup_interval=1,
        log_socket_errors=False,
        connection_limit=_CONNECTIONS + 2,  # with its own socket and the one that wakes it
        max_request_body_size=_LARGEST + 1,
    )
    server.channel_class = _Channel
    logging.getLogger("waitress").setLevel(logging.ERROR)  # it warns of each wait
    return server


def serve(server: waitress.server.TcpWSGIServer) -> None:
    """Print the address and answer until Ctrl-C."""
    print(f"Open http://{HOST}:{server.effective_port} in a browser; Ctrl-C ends it.", flush=True)
    server.run()
