"""A client of an image classifier behind TF Serving, by REST or gRPC. Needs NumPy and protobuf, and grpcio for gRPC.

    from client import RestClient

    with RestClient("http://localhost:8501", "digits") as client:
        [ranking] = client.classify([open("picture.jpg", "rb").read()])
    print(ranking[0].label, ranking[0].score)

The folder works by itself: `python -m export.serving.kit` puts a copy beside the server's configuration. Its imports
are relative for that reason.
"""

from .answers import (
    DeadlineExceededError,
    InvalidRequestError,
    NoSuchModelError,
    Prediction,
    ServingError,
    UnavailableError,
    Version,
)
from .grpc_client import GrpcClient
from .rest_client import RestClient

__all__ = [
    "DeadlineExceededError",
    "GrpcClient",
    "InvalidRequestError",
    "NoSuchModelError",
    "Prediction",
    "RestClient",
    "ServingError",
    "UnavailableError",
    "Version",
]
