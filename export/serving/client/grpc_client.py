"""Client of the gRPC API of TF Serving: tensorflow.serving.PredictionService."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import messages
from .answers import (
    LARGEST_MESSAGE,
    DeadlineExceededError,
    InvalidRequestError,
    NoSuchModelError,
    Prediction,
    ServingError,
    UnavailableError,
    Version,
    check_count,
    features,
    rankings,
    with_retries,
)

_SERVICE = "/tensorflow.serving.PredictionService"
# Feature of a tf.Example with the image file, for the signature "classify".
_FEATURE = "image/encoded"
# Name of a status code -> its error; of others ServingError.
_ERRORS = {
    "UNAVAILABLE": UnavailableError,
    "RESOURCE_EXHAUSTED": UnavailableError,
    "DEADLINE_EXCEEDED": DeadlineExceededError,
    "NOT_FOUND": NoSuchModelError,
    **dict.fromkeys(("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED"), InvalidRequestError),
}


class GrpcClient:
    """Client of one model on one server. Close it, or use it in a `with` statement.

    Args:
        address: host and port, such as localhost:8500.
        model, version, timeout, attempts: see `RestClient`.
        credentials: grpc.ChannelCredentials for an encrypted connection. Default: not encrypted.
    """

    def __init__(
        self,
        address: str,
        model: str,
        *,
        version: Version | None = None,
        timeout: float = 10.0,
        attempts: int = 3,
        credentials=None,
    ):
        import grpc  # imported here, so that RestClient does not need gRPC

        self._grpc, self._address, self._model = grpc, address, model
        self._version, self._timeout, self._attempts = version or Version(), timeout, attempts
        limits = [(f"grpc.max_{way}_message_length", LARGEST_MESSAGE) for way in ("send", "receive")]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=limits)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=limits)
        self._predict = self._method("Predict", messages.PredictRequest, messages.PredictResponse)
        self._classify = self._method("Classify", messages.ClassificationRequest, messages.ClassificationResponse)

    def _method(self, name: str, request: Any, response: Any) -> Callable:
        return self._channel.unary_unary(
            f"{_SERVICE}/{name}",
            request_serializer=request.SerializeToString,
            response_deserializer=response.FromString,
        )

    def __enter__(self) -> "GrpcClient":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def classify(self, images: Sequence[bytes]) -> list[list[Prediction]]:
        """See `RestClient.classify`."""
        return rankings(self.predict({"image_bytes": list(images)}), len(images))

    def features(self, images: Sequence[bytes]) -> np.ndarray:
        """See `RestClient.features`."""
        return features(self.predict({"image_bytes": list(images)}, "features"), len(images))

    def predict(
        self, inputs: Mapping[str, np.ndarray | Sequence[bytes]], signature: str = "serving_default"
    ) -> dict[str, np.ndarray]:
        """Outputs of a signature by name, with the types of the server. Strings are an object array of bytes."""
        request = messages.PredictRequest()
        self._address_model(request.model_spec, signature)
        for name, value in inputs.items():
            messages.put_tensor(request.inputs[name], value if isinstance(value, np.ndarray) else list(value))
        response = self._call(self._predict, request)
        try:
            return {name: messages.to_array(tensor) for name, tensor in response.outputs.items()}
        except (ValueError, OverflowError) as error:
            raise ServingError(f"{self._address} answered with an invalid tensor: {error}") from error

    def classify_examples(self, images: Sequence[bytes]) -> list[list[tuple[str, float]]]:
        """Label and probability of the top classes of each image file, by the Classify API."""
        request = messages.ClassificationRequest()
        self._address_model(request.model_spec, "classify")
        for image in images:
            example = request.input.example_list.examples.add()
            example.features.feature[_FEATURE].bytes_list.value.append(image)
        response = self._call(self._classify, request)
        check_count(response.result.classifications, len(images))
        return [[(best.label, best.score) for best in one.classes] for one in response.result.classifications]

    def _address_model(self, spec, signature: str) -> None:
        spec.name, spec.signature_name = self._model, signature
        if self._version.number is not None:
            spec.version.value = self._version.number
        if self._version.label is not None:
            spec.version_label = self._version.label

    def _call(self, method: Callable, request):
        return with_retries(lambda left: self._once(method, request, left), self._timeout, self._attempts)

    def _once(self, method: Callable, request, seconds: float):
        try:
            return method(request, timeout=seconds)
        except self._grpc.RpcError as error:
            code, message = error.code(), f"{self._address} answered {error.code().name}: {error.details()}"
        if code.name == "DEADLINE_EXCEEDED":
            message = f"{self._address} did not answer within {self._timeout:g} seconds."
        raise _ERRORS.get(code.name, ServingError)(message)
