"""Clients of an image classifier in TF Serving, for REST and gRPC. Need NumPy and protobuf, and grpcio for gRPC.

    from client import RestClient

    with RestClient("http://localhost:8501", "digits") as client:
        [ranking] = client.classify([open("picture.jpg", "rb").read()])
    print(ranking[0].label, ranking[0].score)

`keras-vit serving` copies this folder next to the server configuration, so its imports are relative.
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
