"""Client of the REST API of TF Serving: https://www.tensorflow.org/tfx/serving/api_rest."""

import base64
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
    features,
    rankings,
    with_retries,
)

# Status code of a server or a load balancer -> its error; after UnavailableError another attempt may succeed.
_ERRORS = {404: NoSuchModelError, **dict.fromkeys((429, 502, 503, 504), UnavailableError)}
# Bytes sent or read between two checks of the deadline, and characters of a server message in an error.
_PIECE, _LONGEST_MESSAGE = 2**16, 500


class RestClient:
    """Client of one model on one server.

    Args:
        url: of the server, such as http://localhost:8501, with the path of a proxy, if any.
        model: name of the model on the server.
        version: version of the model. Default: the newest one.
        timeout: seconds for a call with all its attempts.
        attempts: largest number of attempts if the server is unavailable, with growing pauses. Repeated calls are safe.
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
        """Nothing to close: each call has its own connection."""

    def classify(self, images: Sequence[bytes]) -> list[list[Prediction]]:
        """Top classes of each image file (JPEG, PNG, BMP, GIF or WebP), the most probable first."""
        return rankings(self.predict({"image_bytes": list(images)}), len(images)) if images else []

    def features(self, images: Sequence[bytes]) -> np.ndarray:
        """Features of each image file, the input of the head: (B, D) float32."""
        return features(self.predict({"image_bytes": list(images)}, "features"), len(images))

    def predict(
        self, inputs: Mapping[str, np.ndarray | Sequence[bytes]], signature: str = "serving_default"
    ) -> dict[str, np.ndarray]:
        """Outputs of a signature by name. Floats become float32, integers int64, strings str.

        The REST API does not name a single output. Here it has the name of the signature.
        """
        body = {"signature_name": signature, "inputs": {name: _to_json(value) for name, value in inputs.items()}}
        answer = self._request("POST", ":predict", json.dumps(body).encode())
        if "outputs" not in answer:
            raise ServingError(f"{self._address} answered without outputs; it is not TF Serving.")
        outputs = answer["outputs"]
        named = outputs if isinstance(outputs, dict) else {signature: outputs}
        try:
            return {name: _from_json(value) for name, value in named.items()}
        except (ValueError, OverflowError) as error:
            raise ServingError(f"{self._address} answered with invalid outputs: {error}") from error

    def states(self) -> dict[int, str]:
        """State of each version on the server: AVAILABLE, LOADING, …"""
        answer = self._request("GET", "", None)
        try:
            return {int(entry["version"]): str(entry["state"]) for entry in answer["model_version_status"]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ServingError(
                f"{self._address} answered without the states of versions; it is not TF Serving."
            ) from error

    def _request(self, method: str, verb: str, body: bytes | None) -> dict:
        return with_retries(lambda left: self._once(method, verb, body, left), self._timeout, self._attempts)

    def _once(self, method: str, verb: str, body: bytes | None, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        connection = self._connect(self._server, timeout=seconds)
        connection.response_class = type("_TimedResponse", (_Response,), {"deadline": deadline})
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))} if body else {}
        try:
            connection.connect()
            pieces = _in_time(body, connection.sock, deadline) if body else None
            connection.request(method, self._path + verb, pieces, headers)
            response = connection.getresponse()
            status, content = response.status, self._read(response)
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self._address} did not answer within {self._timeout:g} seconds.") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._address} cannot be reached ({error or type(error).__name__}).") from error
        except ValueError as error:  # http.client cannot parse the headers or chunks
            raise ServingError(f"{self._address} answered with invalid HTTP ({error}).") from error
        finally:
            connection.close()
        return self._answer(status, content)

    def _read(self, response: http.client.HTTPResponse) -> bytes:
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
        message = str(answer.get("error", ""))[:_LONGEST_MESSAGE].encode(errors="replace").decode()
        if status == http.HTTPStatus.OK:
            if "error" in answer:
                raise ServingError(f"{self._address} answered with invalid JSON: {message!r}.")
            return answer
        other = InvalidRequestError if 400 <= status < 500 else ServingError
        raise _ERRORS.get(status, other)(f"{self._address} answered {status}: {message}")


def _in_time(body: bytes, connected: socket.socket, deadline: float) -> Iterator[bytes]:
    """Split a body into pieces, and set the socket timeout of each to the remaining time."""
    for start in range(0, len(body), _PIECE):
        connected.settimeout(_left(deadline))
        yield body[start : start + _PIECE]
    connected.settimeout(_left(deadline))


def _left(deadline: float) -> float:
    """Seconds until a time of the monotonic clock. Raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _Response(http.client.HTTPResponse):
    """A response whose headers and body must arrive before a deadline."""

    deadline: float

    def __init__(self, connected: socket.socket, *arguments, **options):
        super().__init__(connected, *arguments, **options)
        self.fp.close()
        self.fp = io.BufferedReader(_TimedReader(connected, self.deadline))


class _TimedReader(io.RawIOBase):
    """Reads from a socket until a deadline."""

    def __init__(self, connected: socket.socket, deadline: float):
        self._connected, self._deadline = connected, deadline
        self._raw = connected.makefile("rb", buffering=0)  # keeps the socket open until the response is read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int | None:
        self._connected.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _to_json(value: np.ndarray | Sequence[bytes]) -> list:
    """Convert an input to JSON. Bytes become {"b64": …}, as TF Serving requires."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ValueError("A request by REST can only hold finite numbers; use gRPC for others.")
        return value.tolist()
    return [{"b64": base64.b64encode(element).decode("ascii")} for element in value]


def _from_json(value) -> np.ndarray:
    """Convert nested lists of numbers, strings or booleans to an array. Raises ValueError for other values."""
    kinds = {type(leaf) for leaf in np.array(value, object).ravel()}
    if kinds <= {str} and kinds:
        return np.array(value, str)
    if kinds == {bool}:
        return np.array(value, bool)
    if not kinds <= {int, float}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"their elements should be of one type, in lists of one length, but are of types {found}")
    with np.errstate(over="ignore"):  # large numbers become infinite in float32
        return np.array(value, np.int64 if kinds == {int} else np.float32)
