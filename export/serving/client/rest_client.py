"""The REST interface of TF Serving: https://www.tensorflow.org/tfx/serving/api_rest."""

import base64
import http.client
import json
import urllib.parse
from collections.abc import Mapping, Sequence

import numpy as np

from .answers import (
    DeadlineExceededError,
    InvalidRequestError,
    NoSuchModelError,
    Prediction,
    ServingError,
    UnavailableError,
    Version,
    check_limits,
    rankings,
    with_retries,
)

# What a server, or a balancer before it, answers when another attempt may succeed.
_TRY_AGAIN = {429, 502, 503, 504}


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
        return rankings(self.predict({"image_bytes": list(images)})) if images else []

    def features(self, images: Sequence[bytes]) -> np.ndarray:
        """What the classifier's head reads of each image file: (B, D) float32."""
        return self.predict({"image_bytes": list(images)}, "features")["features"]

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
        return {name: _from_json(value) for name, value in named.items()}

    def states(self) -> dict[int, str]:
        """Version number -> AVAILABLE, LOADING, … of the versions that the server knows."""
        answer = self._request("GET", "", None)
        return {int(entry["version"]): entry["state"] for entry in answer.get("model_version_status", ())}

    def _request(self, method: str, verb: str, body: bytes | None) -> dict:
        return with_retries(lambda left: self._once(method, verb, body, left), self._timeout, self._attempts)

    def _once(self, method: str, verb: str, body: bytes | None, seconds: float) -> dict:
        connection = self._connect(self._server, timeout=seconds)
        try:
            connection.request(method, self._path + verb, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            status, content = response.status, response.read()
        except TimeoutError as error:
            raise DeadlineExceededError(f"{self._address} did not answer within {self._timeout:g} seconds.") from error
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._address} cannot be reached ({error or type(error).__name__}).") from error
        finally:
            connection.close()
        return self._answer(status, content)

    def _answer(self, status: int, content: bytes) -> dict:
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            answer = {"error": content[:200].decode(errors="replace")}
        if status == http.HTTPStatus.OK:
            if "error" in answer:
                raise ServingError(f"{self._address} answered with something else than JSON: {answer['error']!r}.")
            return answer
        said = f"{self._address} answered {status}: {answer.get('error', '')}"
        if status in _TRY_AGAIN:
            raise UnavailableError(said)
        if status == http.HTTPStatus.NOT_FOUND:
            raise NoSuchModelError(said)
        raise (InvalidRequestError if 400 <= status < 500 else ServingError)(said)


def _to_json(value: np.ndarray | Sequence[bytes]) -> list:
    """Bytes are {"b64": …}; JSON as TF Serving reads it knows no other form of them."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            raise ValueError("A request by REST can only hold finite numbers; use gRPC for others.")
        return value.tolist()
    return [{"b64": base64.b64encode(element).decode("ascii")} for element in value]


def _from_json(value) -> np.ndarray:
    array = np.array(value)
    return array.astype(np.float32) if array.dtype == np.float64 else array
