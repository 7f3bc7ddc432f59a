"""The gRPC interface of TF Serving: tensorflow.serving.PredictionService."""

from collections.abc import Callable, Mapping, Sequence

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
    check_limits,
    features,
    rankings,
    with_retries,
)

_SERVICE = "/tensorflow.serving.PredictionService"
# Where the signature "classify" looks for an image file in a tf.Example.
_FEATURE = "image/encoded"


class GrpcClient:
    """Asks one model of one server. Close it, or use it in a `with`.

    Args:
        address: host and port, such as localhost:8500.
        model: its name there.
        version: default the newest.
        timeout: seconds for a call with all its attempts.
        attempts: how often an unavailable server is asked, with growing pauses; every call may be repeated safely.
        credentials: grpc.ChannelCredentials for an encrypted connection; default none.
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
        import grpc  # here, so that REST needs no gRPC

        check_limits(timeout, attempts)
        self._grpc, self._address, self._model = grpc, address, model
        self._version, self._timeout, self._attempts = version or Version(), timeout, attempts
        limits = [(f"grpc.max_{way}_message_length", LARGEST_MESSAGE) for way in ("send", "receive")]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=limits)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=limits)
        self._predict = self._method("Predict", messages.PredictRequest, messages.PredictResponse)
        self._classify = self._method("Classify", messages.ClassificationRequest, messages.ClassificationResponse)

    def _method(self, name: str, request: type, response: type) -> Callable:
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
        """Give the connection back."""
        self._channel.close()

    def classify(self, images: Sequence[bytes]) -> list[list[Prediction]]:
        """The likeliest classes of each image file (JPEG, PNG, BMP, GIF or WebP), likeliest first."""
        return rankings(self.predict({"image_bytes": list(images)}), len(images))

    def features(self, images: Sequence[bytes]) -> np.ndarray:
        """What the classifier's head reads of each image file: (B, D) float32."""
        return features(self.predict({"image_bytes": list(images)}, "features"), len(images))

    def predict(
        self, inputs: Mapping[str, np.ndarray | Sequence[bytes]], signature: str = "serving_default"
    ) -> dict[str, np.ndarray]:
        """The outputs of any signature by name, with the server's types; strings are bytes in an object array."""
        request = messages.PredictRequest()
        self._address_model(request.model_spec, signature)
        for name, value in inputs.items():
            messages.put_tensor(request.inputs[name], value if isinstance(value, np.ndarray) else list(value))
        response = self._call(self._predict, request)
        try:
            return {name: messages.to_array(tensor) for name, tensor in response.outputs.items()}
        except (ValueError, OverflowError) as error:
            raise ServingError(f"{self._address} answered with a tensor that is none: {error}") from error

    def classify_examples(self, images: Sequence[bytes]) -> list[list[tuple[str, float]]]:
        """By the Classify call: label and probability of the likeliest classes of each image file."""
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
            code, said = error.code(), f"{self._address} answered {error.code().name}: {error.details()}"
        codes = self._grpc.StatusCode
        if code in (codes.UNAVAILABLE, codes.RESOURCE_EXHAUSTED):
            raise UnavailableError(said)
        if code == codes.DEADLINE_EXCEEDED:
            raise DeadlineExceededError(f"{self._address} did not answer within {self._timeout:g} seconds.")
        if code == codes.NOT_FOUND:
            raise NoSuchModelError(said)
        if code in (codes.INVALID_ARGUMENT, codes.FAILED_PRECONDITION, codes.OUT_OF_RANGE, codes.UNIMPLEMENTED):
            raise InvalidRequestError(said)
        raise ServingError(said)
