"""The REST interface of TF Serving: https://www.tensorflow.org/tfx/serving/api_rest."""

import base64
import functools
import http.client
import io
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from .answers import (
    LARGEST_MESSAGE,
    DeadlineExceededError,
    InvalidRequestError,
    NoSuchModelError,
    Prediction,
    ServingError,
    UnavailableError,
    Version,
    check_limits,
    features,
    rankings,
    with_retries,
)

# What a server, or a balancer before it, answers when another attempt may succeed.
_TRY_AGAIN = {429, 502, 503, 504}
# Bytes that are sent or read between two looks at the clock, and characters of a server's own words in an error.
_PIECE, _MOST_WORDS = 2**16, 500


class RestClient:
    """Asks one model of one server.

    Args:
        url: of the server, such as http://localhost:8501, with a path where a proxy has one.
        model: its name there.
        version: default the newest.
        timeout: seconds for a call with all its attempts.
        attempts: how often an unavailable server is asked, with growing pauses; every call may be repeated safely.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        version: Version | None = None,
        timeout: float = 10.0,
        attempts: int = 3,
    ):
        check_limits(timeout, attempts)
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be like http://localhost:8501, but is {url!r}.")
        self._connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._server, self._address = parts.netloc, url
        version = version or Version()
        path = f"{parts.path.rstrip('/')}/v1/models/{urllib.parse.quote(model, safe='')}"
        if version.number is not None:
            path += f"/versions/{version.number}"
        if version.label is not None:
            path += f"/labels/{urllib.parse.quote(version.label, safe='')}"
        self._path, self._timeout, self._attempts = path, timeout, attempts

    def __enter__(self) -> "RestClient":
        return self

    def __exit__(self, *_) -> None:
        """Nothing is held between calls."""

    def classify(self, images: Sequence[bytes]) -> list[list[Prediction]]:
        """The likeliest classes of each image file (JPEG, PNG, BMP, GIF or WebP), likeliest first."""
        return rankings(self.predict({"image_bytes": list(images)}), len(images)) if images else []

    def features(self, images: Sequence[bytes]) -> np.ndarray:
        """What the classifier's head reads of each image file: (B, D) float32."""
        return features(self.predict({"image_bytes": list(images)}, "features"), len(images))

    def predict(
        self, inputs: Mapping[str, np.ndarray | Sequence[bytes]], signature: str = "serving_default"
    ) -> dict[str, np.ndarray]:
        """The outputs of any signature by name; floats become float32, whole numbers int64, strings str.

        The interface does not name the output of a signature that has one alone: it bears the signature's name here.
        """
        body = {"signature_name": signature, "inputs": {name: _to_json(value) for name, value in inputs.items()}}
        answer = self._request("POST", ":predict", json.dumps(body).encode())
        if "outputs" not in answer:
            raise ServingError(f"{self._address} answered without outputs; it is no TF Serving.")
        outputs = answer["outputs"]
        named = outputs if isinstance(outputs, dict) else {signature: outputs}
        try:
            return {name: _from_json(value) for name, value in named.items()}
        except (ValueError, OverflowError) as error:
            raise ServingError(f"{self._address} answered with outputs that are no arrays: {error}") from error

    def states(self) -> dict[int, str]:
        """Version number -> AVAILABLE, LOADING, … of the versions that the server knows."""
        answer = self._request("GET", "", None)
        try:
            return {int(entry["version"]): str(entry["state"]) for entry in answer["model_version_status"]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServingError(
                f"{self._address} answered without the states of versions; it is no TF Serving."
            ) from error

    def _request(self, method: str, verb: str, body: bytes | None) -> dict:
        return with_retries(lambda left: self._once(method, verb, body, left), self._timeout, self._attempts)

    def _once(self, method: str, verb: str, body: bytes | None, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        connection = self._connect(self._server, timeout=seconds)
        connection.response_class = functools.partial(_Response, deadline=deadline)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} if body else {}
        try:
            connection.connect()
            pieces = _in_time(body, connection.sock, deadline) if body else None
            connection.request(method, self._path + verb, pieces, headers)
            response = connection.getresponse()
            status, content = response.status, self._whole(response)
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self._address} did not answer within {self._timeout:g} seconds.") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._address} cannot be reached ({error or type(error).__name__}).") from error
        except ValueError as error:  # http.client's own parsing of headers and chunks
            raise ServingError(f"{self._address} answered with something else than HTTP ({error}).") from error
        finally:
            connection.close()
        return self._answer(status, content)

    def _whole(self, response: http.client.HTTPResponse) -> bytes:
        content = bytearray()
        while piece := response.read1(_PIECE):
            content += piece
            if len(content) > LARGEST_MESSAGE:
                raise ServingError(f"{self._address} answered with more than {LARGEST_MESSAGE:,} bytes.")
        if response.length:
            raise http.client.IncompleteRead(b"", response.length)
        return bytes(content)

    def _answer(self, status: int, content: bytes) -> dict:
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            answer = {"error": content[:200].decode(errors="replace")}
        words = str(answer.get("error", ""))[:_MOST_WORDS].encode(errors="replace").decode()
        if status == http.HTTPStatus.OK:
            if "error" in answer:
                raise ServingError(f"{self._address} answered with something else than JSON: {words!r}.")
            return answer
        said = f"{self._address} answered {status}: {words}"
        if status in _TRY_AGAIN:
            raise UnavailableError(said)
        if status == http.HTTPStatus.NOT_FOUND:
            raise NoSuchModelError(said)
        raise (InvalidRequestError if 400 <= status < 500 else ServingError)(said)


def _in_time(body: bytes, connected: socket.socket, deadline: float) -> Iterator[bytes]:
    """The pieces of a body; the time left is the limit for each, since a socket's timeout is that of one call."""
    for start in range(0, len(body), _PIECE):
        connected.settimeout(_left(deadline))
        yield body[start : start + _PIECE]
    connected.settimeout(_left(deadline))


def _left(deadline: float) -> float:
    """Seconds until a time of the monotonic clock. Raises TimeoutError when it is over."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Response(http.client.HTTPResponse):
    """A response that is read until a deadline, however slowly it comes: headers, body and all."""

    def __init__(self, connected: socket.socket, *arguments, deadline: float, **options):
        super().__init__(connected, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_Arriving(connected, deadline))


class _Arriving(io.RawIOBase):
    """What a socket receives until a deadline."""

    def __init__(self, connected: socket.socket, deadline: float):
        self._connected, self._deadline = connected, deadline
        self._raw = connected.makefile("rb", buffering=0)  # keeps the socket open until the whole answer is read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self._connected.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _to_json(value: np.ndarray | Sequence[bytes]) -> list:
    """Bytes are {"b64": …}; JSON as TF Serving reads it knows no other form of them."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ValueError("A request by REST can only hold finite numbers; use gRPC for others.")
        return value.tolist()
    return [{"b64": base64.b64encode(element).decode("ascii")} for element in value]


def _from_json(value) -> np.ndarray:
    """Nested lists of numbers, texts or truth values, one length per axis. Raises ValueError for any others."""
    kinds = {type(leaf) for leaf in np.array(value, object).ravel()}
    if kinds <= {str} and kinds:
        return np.array(value, str)
    if kinds == {bool}:
        return np.array(value, bool)
    if not kinds <= {int, float}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"their elements should be of one type, in lists of one length, but are of types {found}")
    with np.errstate(over="ignore"):  # infinite in float32, then
        return np.array(value, np.int64 if kinds == {int} else np.float32)
