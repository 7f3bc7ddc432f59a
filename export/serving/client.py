"""Client of an image classifier in TF Serving, by REST. Needs only the standard library.

    from client import RestClient

    client = RestClient("http://localhost:8501", "digits", version="stable")
    [ranking] = client.classify([open("image.jpg", "rb").read()])
    print(ranking[0].label, ranking[0].score)

`keras-vit serving` copies this file next to the server configuration.
"""

import base64
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_LARGEST = 256 * 2**20  # largest answer in bytes
_TRY_AGAIN = {429, 503}  # too many requests, and a server that is starting


class ServingError(RuntimeError):
    """The call failed; the message contains the server's. `status` is that of HTTP, None if there was no answer."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class Prediction(NamedTuple):
    """One of the top classes of an image; the score is a probability, 0 to 1."""

    label: str
    class_index: int
    score: float


class RestClient:
    """Client of one model on one server. It may be used by several threads.

    Args:
        url: of the server, such as http://localhost:8501.
        model: its name there.
        version: number or label. Default: the newest version.
        timeout: seconds that the server may be silent.
        attempts: number of attempts while the server cannot be reached or is overloaded.
    """

    def __init__(
        self, url: str, model: str, *, version: int | str | None = None, timeout: float = 10.0, attempts: int = 3
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url must be like http://localhost:8501, but is {url!r}.")
        self._url = f"{url.rstrip('/')}/v1/models/{urllib.parse.quote(model, safe='')}"
        if version is not None:
            by = "versions" if isinstance(version, int) else "labels"
            self._url += f"/{by}/{urllib.parse.quote(str(version), safe='')}"
        self._timeout, self._attempts = timeout, attempts

    def classify(self, images: Sequence[bytes]) -> list[list[Prediction]]:
        """Return the top classes of each image file, the most probable first."""
        outputs = self.predict({"image_bytes": images})
        try:
            columns = [outputs[name] for name in ("labels", "classes", "scores")]
            rankings = [[Prediction(*best) for best in zip(*row, strict=True)] for row in zip(*columns, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise ServingError(f"{self._url} has no labels, classes and scores: another kind of model.") from error
        return self._one_each(rankings, images)

    def features(self, images: Sequence[bytes]) -> list[list[float]]:
        """Return the features of each image file, the input of the head."""
        return self._one_each(self.predict({"image_bytes": images}, "features"), images)

    def predict(self, inputs: Mapping[str, Any], signature: str = "serving_default") -> Any:
        """Return the outputs of a signature by name, or the only output: nested lists.

        Args:
            inputs: by name, image files as bytes or nested lists of numbers.
            signature: name of the signature.
        """
        encoded = {name: [_encoded(element) for element in value] for name, value in inputs.items()}
        answer = self._request(":predict", {"signature_name": signature, "inputs": encoded})
        if "outputs" not in answer:
            raise ServingError(f"{self._url} answered without outputs; it is not TF Serving.")
        return answer["outputs"]

    def _one_each(self, rows: Any, images: Sequence[bytes]) -> Any:
        if not isinstance(rows, list) or len(rows) != len(images):
            raise ServingError(f"{self._url} did not answer with one row for each of {len(images)} images.")
        return rows

    def _request(self, verb: str, body: dict | None) -> dict[str, Any]:
        for attempt in range(1, self._attempts + 1):
            try:
                return self._once(verb, body)
            except ServingError as error:
                if attempt == self._attempts or not (error.status is None or error.status in _TRY_AGAIN):
                    raise
                time.sleep(0.1 * 2**attempt)
        raise ValueError(f"attempts must be at least 1, but is {self._attempts}.")

    def _once(self, verb: str, body: dict | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(self._url + verb, data, {"Content-Type": "application/json"})
        try:
            try:
                response = urllib.request.urlopen(request, timeout=self._timeout)
            except urllib.error.HTTPError as error:
                response = error
            with response:
                status, content = response.status, response.read(_LARGEST + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServingError(f"{self._url} cannot be reached ({error or type(error).__name__}).") from error
        try:
            answer = json.loads(content) if len(content) <= _LARGEST else None
        except (ValueError, RecursionError):
            answer = None
        if status == 200 and isinstance(answer, dict):
            return answer
        message = answer.get("error") if isinstance(answer, dict) else content[:200].decode(errors="replace")
        raise ServingError(f"{self._url} answered {status}: {str(message)[:500]}", status)


def _encoded(element: Any) -> Any:
    """Return bytes as {"b64": …}, as TF Serving requires."""
    return {"b64": base64.b64encode(element).decode()} if isinstance(element, bytes) else element
