"""The clients against servers with the documented JSON and the official messages of TF Serving; the server files."""

import concurrent.futures
import contextlib
import http.server
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import types

import grpc
import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from hypothesis import strategies

from export.options import KitOptions
from export.serving import configuration
from export.serving.client import (
    DeadlineExceededError,
    GrpcClient,
    InvalidRequestError,
    NoSuchModelError,
    Prediction,
    RestClient,
    ServingError,
    UnavailableError,
    Version,
    messages,
    rest_client,
)
from keras_vit import UserError
from tests.support import official

IMAGES = [b"\xff\xd8 a JPEG", b"\x89PNG another"]
ANSWER = {
    "labels": [["wren", "\u017bubr"], ["ant", "wren"]],
    "classes": [[4, 2], [0, 4]],
    "scores": [[0.75, 0.125], [0.5, 0.25]],
    "probabilities": [[0.0, 0.0, 0.125, 0.125, 0.75], [0.5, 0.25, 0.0, 0.0, 0.25]],
}
RANKINGS = [
    [Prediction("wren", 4, 0.75), Prediction("\u017bubr", 2, 0.125)],
    [Prediction("ant", 0, 0.5), Prediction("wren", 4, 0.25)],
]


class Handler(http.server.BaseHTTPRequestHandler):
    """Notes each request and gives the answers of its server in turn, the last one ever again."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path, json.loads(body) if body else None))
        answers = self.server.answers
        status, content, wait = answers.pop(0) if len(answers) > 1 else answers[0]
        time.sleep(wait)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

    do_GET = do_POST  # noqa: N815  (the base class's name)

    def log_message(self, *_) -> None:
        """Nothing."""


@pytest.fixture(name="server")
def _server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests, server.answers = [], [(200, {"outputs": ANSWER}, 0)]
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_rest_asks_in_the_documented_form_and_reads_the_answer(server):
    with RestClient(server.url, "birds") as client:
        assert client.classify(IMAGES) == RANKINGS
    assert server.requests == [
        (
            "POST",
            "/v1/models/birds:predict",
            {
                "signature_name": "serving_default",
                "inputs": {"image_bytes": [{"b64": "/9ggYSBKUEVH"}, {"b64": "iVBORyBhbm90aGVy"}]},
            },
        )
    ]


def test_rest_asks_a_version_by_number_or_by_label_behind_a_proxy(server):
    RestClient(f"{server.url}/vision/", "a b", version=Version(number=3)).classify(IMAGES)
    RestClient(server.url, "birds", version=Version(label="stable")).classify(IMAGES)
    assert [path for _, path, _ in server.requests] == [
        "/vision/v1/models/a%20b/versions/3:predict",
        "/v1/models/birds/labels/stable:predict",
    ]
    with pytest.raises(ValueError, match="a number or a label, but got 3 and 'stable'"):
        Version(3, "stable")


def test_rest_names_the_only_output_after_its_signature(server):
    server.answers = [(200, {"outputs": [[1.5, -2.0], [0.25, 1e-8]]}, 0)]
    features = RestClient(server.url, "birds").features(IMAGES)
    assert features.dtype == np.float32
    np.testing.assert_array_equal(features, np.float32([[1.5, -2.0], [0.25, 1e-8]]))


def test_rest_sends_arrays_and_refuses_what_json_cannot_hold(server):
    client = RestClient(server.url, "birds")
    client.predict({"image": np.float32([[[0.5]]])}, "image_tensor")
    assert server.requests[0][2] == {"signature_name": "image_tensor", "inputs": {"image": [[[0.5]]]}}
    with pytest.raises(ValueError, match="only hold finite numbers; use gRPC"):
        client.predict({"image": np.float32([np.nan])}, "image_tensor")
    assert client.classify([]) == []
    assert len(server.requests) == 1


def test_rest_lists_the_versions(server):
    states = [
        {"version": "2", "state": "AVAILABLE", "status": {"error_code": "OK"}},
        {"version": "3", "state": "LOADING"},
    ]
    server.answers = [(200, {"model_version_status": states}, 0)]
    assert RestClient(server.url, "birds").states() == {2: "AVAILABLE", 3: "LOADING"}
    assert server.requests == [("GET", "/v1/models/birds", None)]


@pytest.mark.parametrize(
    ("status", "content", "error", "words"),
    [
        (
            400,
            {"error": "image_bytes[1]: no whole JPEG"},
            InvalidRequestError,
            r"answered 400: image_bytes\[1\]: no whole",
        ),
        (404, {"error": "Servable not found"}, NoSuchModelError, "answered 404: Servable not found"),
        (500, {"error": "boom"}, ServingError, "answered 500: boom"),
        (200, b"<html>", ServingError, "invalid JSON: '<html>'"),
        (200, {"predictions": []}, ServingError, "answered without outputs"),
        (200, {"outputs": {"logits": [[1.0]]}}, ServingError, "has no classes, labels, scores"),
    ],
)
def test_a_rest_error_is_raised_and_not_retried(server, status, content, error, words):
    server.answers = [(status, content, 0)]
    with pytest.raises(error, match=words) as caught:
        RestClient(server.url, "birds").classify(IMAGES)
    assert caught.type is error
    assert len(server.requests) == 1


def test_rest_tries_an_overloaded_server_again(server):
    server.answers = [(503, {"error": "busy"}, 0), (429, b"slow down", 0), (200, {"outputs": ANSWER}, 0)]
    assert RestClient(server.url, "birds").classify(IMAGES) == RANKINGS
    assert len(server.requests) == 3


def test_rest_gives_up_after_its_attempts_or_its_time(server):
    server.answers = [(503, {"error": "busy"}, 0)]
    with pytest.raises(UnavailableError, match="answered 503: busy"):
        RestClient(server.url, "birds", attempts=2).classify(IMAGES)
    assert len(server.requests) == 2
    with pytest.raises(DeadlineExceededError, match=r"within 0.01 seconds"):
        RestClient(server.url, "birds", attempts=99, timeout=0.01).classify(IMAGES)
    server.answers = [(200, {"outputs": ANSWER}, 0.5)]
    with pytest.raises(DeadlineExceededError, match=r"within 0.1 seconds"):
        RestClient(server.url, "birds", timeout=0.1).classify(IMAGES)


def test_an_unreachable_server_is_reported_with_its_address():
    with pytest.raises(UnavailableError, match="http://127.0.0.1:1 cannot be reached .*refused"):
        RestClient("http://127.0.0.1:1", "birds", attempts=1).classify(IMAGES)
    for url in ("localhost:8501", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="url must be like http://localhost:8501"):
            RestClient(url, "birds")


@pytest.mark.parametrize("fewer", [0, 1])
def test_fewer_answers_than_images_are_an_error(server, fewer):
    server.answers = [(200, {"outputs": {name: rows[:fewer] for name, rows in ANSWER.items()}}, 0)]
    with pytest.raises(ServingError, match=rf"has 2 images, but the response has {fewer}|the same shape \(B, k\)"):
        RestClient(server.url, "birds").classify(IMAGES)
    server.answers = [(200, {"outputs": [[1.5, -2.0]]}, 0)]
    with pytest.raises(ServingError, match="has 2 images, but the response has 1"):
        RestClient(server.url, "birds").features(IMAGES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": [[0.75, float("nan")], [0.5, 0.25]]}, "scores that are not finite"),
        ({"scores": [[0.75], [0.5, 0.25]]}, "invalid outputs: .* are of types list"),
        ({"scores": [[0.75], [0.5]]}, r"the same shape \(B, k\), but has"),
        ({"scores": [["0.75", "0.1"], ["0.5", "0.2"]]}, "scores that are numbers"),
        ({"classes": [[4.5, 2], [0, 4]]}, "classes that are integers"),
        ({"labels": [["wren", 3], ["ant", "wren"]]}, "invalid outputs: .* of types int, str"),
        ({"labels": [["wren", None], ["ant", "wren"]]}, "invalid outputs"),
        ({"classes": [[10**30, 2], [0, 4]]}, "invalid outputs"),
    ],
)
def test_outputs_that_cannot_be_rankings_are_an_error(server, changes, words):
    server.answers = [(200, {"outputs": ANSWER | changes}, 0)]
    with pytest.raises(ServingError, match=words):
        RestClient(server.url, "birds").classify(IMAGES)


def test_states_that_are_none_are_an_error(server):
    for content in ({}, {"model_version_status": 3}, {"model_version_status": [{"version": "x", "state": "LOADING"}]}):
        server.answers = [(200, content, 0)]
        with pytest.raises(ServingError, match="without the states of versions; it is not TF Serving"):
            RestClient(server.url, "birds").states()


@pytest.fixture(name="talker")
def _talker():
    """A server that sends to each client the pieces in `said`, whatever is asked, with a pause after each."""
    listening = socket.create_server(("127.0.0.1", 0))
    talker = types.SimpleNamespace(said=[], pause=0.0, url=f"http://127.0.0.1:{listening.getsockname()[1]}")

    def talk() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                received = client.recv(2**16)
                while b"}" not in received:
                    received += client.recv(2**16)
                for piece in talker.said:
                    client.sendall(piece)
                    time.sleep(talker.pause)

    thread = threading.Thread(target=talk)
    thread.start()
    yield talker
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


HEAD = b"HTTP/1.1 200 OK\r\n"
WHOLE = json.dumps({"outputs": ANSWER}).encode()


@pytest.mark.parametrize(
    "start", [b"", HEAD, HEAD + b"Content-Length: 9999\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n"]
)
def test_a_slow_response_does_not_outlast_the_deadline(talker, start):
    talker.said, talker.pause = [start, *[b"1"] * 30], 0.05
    with pytest.raises(DeadlineExceededError, match=r"within 0.3 seconds"):
        RestClient(talker.url, "birds", timeout=0.3).classify(IMAGES)


def test_a_server_that_does_not_listen_does_not_outlast_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = RestClient(f"http://127.0.0.1:{listening.getsockname()[1]}", "birds", timeout=0.2)
        with pytest.raises(DeadlineExceededError):
            client.classify([bytes(2**24)])


def test_an_endless_response_is_not_read_to_its_end(talker, monkeypatch):
    monkeypatch.setattr(rest_client, "LARGEST_MESSAGE", 10**5)
    talker.said = [HEAD + b"\r\n", *[b"7" * 10_000] * 10**3]
    with pytest.raises(ServingError, match="answered with more than 100,000 bytes"):
        RestClient(talker.url, "birds").classify(IMAGES)


@pytest.mark.parametrize("length", [len(WHOLE) + 1, 10**30])
def test_an_incomplete_response_is_an_error(talker, length):
    talker.said = [HEAD + b"Content-Length: %d\r\n\r\n" % length + WHOLE]
    with pytest.raises(UnavailableError, match="IncompleteRead"):
        RestClient(talker.url, "birds", attempts=1).classify(IMAGES)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**5, b'{"a":' * 10**5, b'{"outputs": ' + b"[" * 200 + b"]" * 200 + b"}", b'{"outputs": "\xff"}',
        b'{"error": "\\ud800"}', b"9" * 5000, b"\xff\xfe{", b'{"outputs": {"labels": {}, "scores": 1, "classes": []}}',
    ],
)  # fmt: skip
@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
def test_json_that_cannot_be_read_is_one_clear_error(talker, status, content):
    talker.said = [b"HTTP/1.1 " + status + b"\r\n\r\n" + content]
    with pytest.raises(ServingError) as caught:
        RestClient(talker.url, "birds").classify(IMAGES)
    assert len(str(caught.value).encode()) < 1000


JSON = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers()
    | strategies.floats()
    | strategies.text(max_size=4),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(strategies.text(max_size=4), inner),
)
OUTPUTS = strategies.fixed_dictionaries(
    {}, optional={name: strategies.sampled_from([rows, rows[:1], rows[0]]) | JSON for name, rows in ANSWER.items()}
)


@strategies.composite
def answers(draw) -> bytes:
    """What a server may send: a status, and JSON of any kind, with some bytes changed or cut off."""
    body = draw(
        strategies.builds(json.dumps, JSON | strategies.fixed_dictionaries({"outputs": OUTPUTS | JSON}))
    ).encode()
    status = draw(strategies.sampled_from([b"200 OK", b"200 OK", b"400 Bad", b"404 Not", b"503 Busy", b"999 ?"]))
    framing = draw(
        strategies.sampled_from([b"", b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked", b"X: \xff"])
    )
    if b"chunked" in framing:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    content = bytearray(b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\n" + body)
    for position, byte in draw(
        strategies.lists(strategies.tuples(strategies.integers(0, 999), strategies.binary(max_size=2)), max_size=3)
    ):
        start = position % (len(content) + 1)
        content[start : start + 1] = byte
    return bytes(content[: draw(strategies.sampled_from([None, None, 60, 90]))])


@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(said=answers())
def test_any_response_is_an_answer_or_a_documented_error(talker, said):
    talker.said = [said]
    client = RestClient(talker.url, "birds", attempts=1, timeout=5.0)
    with contextlib.suppress(ServingError):
        ranked = client.classify(IMAGES)
        assert [len(row) for row in ranked] in ([n, n] for n in range(3))
    with contextlib.suppress(ServingError):
        assert all(isinstance(array, np.ndarray) for array in client.predict({"image_bytes": IMAGES}).values())


# gRPC, from a server on the official messages


class Service(grpc.GenericRpcHandler):
    """tensorflow.serving.PredictionService as far as a client of ours calls it."""

    def __init__(self):
        self.requests, self.errors = [], []
        self.most, self.change = None, lambda response: None

    def service(self, call):
        name = call.method.removeprefix("/tensorflow.serving.PredictionService/")
        request, response, method = {
            "Predict": (official("PredictRequest"), official("PredictResponse"), self.predict),
            "Classify": (official("ClassificationRequest"), official("ClassificationResponse"), self.classify),
        }[name]
        return grpc.unary_unary_rpc_method_handler(method, request.FromString, response.SerializeToString)

    def note(self, request, context) -> None:
        self.requests.append(request)
        if self.errors:
            context.abort(*self.errors.pop(0))

    def predict(self, request, context):
        self.note(request, context)
        response = official("PredictResponse")()
        if request.model_spec.signature_name == "features":
            files = tf.make_ndarray(request.inputs["image_bytes"])
            values = {"features": np.float32([[len(file), 0.5] for file in files])[: self.most]}
        elif request.model_spec.signature_name == "echo":
            values = {name: tf.make_ndarray(tensor) for name, tensor in request.inputs.items()}
        else:
            values = {**ANSWER, "labels": np.array([[label.encode() for label in row] for row in ANSWER["labels"]])}
        for name, value in values.items():
            response.outputs[name].CopyFrom(tf.make_tensor_proto(value))
        self.change(response)
        return response

    def classify(self, request, context):
        self.note(request, context)
        response = official("ClassificationResponse")()
        for _ in request.input.example_list.examples[: self.most]:
            response.result.classifications.add().classes.add(label="\u017bubr", score=0.75)
        return response


@pytest.fixture(name="service")
def _service():
    service = Service()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2), handlers=[service])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with GrpcClient(f"127.0.0.1:{port}", "birds", version=Version(label="stable")) as client:
        yield service, client
    server.stop(None).wait()


def test_grpc_speaks_the_official_messages(service):
    service, client = service
    assert client.classify(IMAGES) == RANKINGS
    (request,) = service.requests
    assert request.model_spec == official("ModelSpec")(
        name="birds", version_label="stable", signature_name="serving_default"
    )
    assert tf.make_ndarray(request.inputs["image_bytes"]).tolist() == IMAGES
    np.testing.assert_array_equal(client.features(IMAGES), np.float32([[9, 0.5], [12, 0.5]]))
    assert client.classify_examples(IMAGES) == [[("\u017bubr", 0.75)]] * 2
    assert [
        tf.train.Example.FromString(given.SerializeToString()).features.feature["image/encoded"].bytes_list.value[0]
        for given in service.requests[-1].input.example_list.examples
    ] == IMAGES


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_])
def test_grpc_carries_arrays_of_every_type_there_and_back(service, dtype):
    for array in (np.arange(6).reshape(2, 1, 3).astype(dtype), np.ones((2, 5), dtype), np.zeros((0, 3), dtype)):
        (back,) = service[1].predict({"x": array}, "echo").values()
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    with pytest.raises(TypeError, match="an array of numbers or a list of bytes, but is complex128"):
        service[1].predict({"x": np.ones(2, complex)}, "echo")


def test_grpc_carries_an_empty_batch_of_files(service):
    (back,) = service[1].predict({"x": []}, "echo").values()
    assert (back.dtype, back.shape) == (object, (0,))


@pytest.mark.parametrize(
    ("code", "error", "attempts"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError, 1),
        (grpc.StatusCode.NOT_FOUND, NoSuchModelError, 1),
        (grpc.StatusCode.INTERNAL, ServingError, 1),
        (grpc.StatusCode.UNAVAILABLE, UnavailableError, 3),
    ],
)
def test_a_grpc_error_is_raised(service, code, error, attempts):
    service, client = service
    service.errors = [(code, "image_bytes[1]: no whole JPEG")] * 3
    with pytest.raises(error, match=rf"answered {code.name}: image_bytes\[1\]: no whole JPEG") as caught:
        client.classify(IMAGES)
    assert caught.type is error
    assert len(service.requests) == attempts


def test_grpc_tries_again_and_keeps_its_deadline(service):
    service, client = service
    service.errors = [(grpc.StatusCode.UNAVAILABLE, "restarting")] * 2
    assert client.classify(IMAGES) == RANKINGS
    with GrpcClient("127.0.0.1:1", "birds", timeout=0.2, attempts=99) as lonely, pytest.raises(ServingError):
        lonely.classify(IMAGES)


def test_fewer_answers_than_images_are_an_error_by_grpc(service):
    service, client = service
    service.most = 1
    for ask in (client.features, client.classify_examples):
        with pytest.raises(ServingError, match="has 2 images, but the response has 1"):
            ask(IMAGES)
    with pytest.raises(ServingError, match="has 3 images, but the response has 2"):
        client.classify([*IMAGES, IMAGES[0]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": 14}, "has the type 14, which is none of"),
        ({"dtype": 0}, "has the type 0"),
        ({"tensor_shape": (2, -1)}, r"of shape \[2, -1\] cannot be read"),
        ({"tensor_shape": (2**40, 2**40)}, "cannot be read; sizes are at least 0"),
        ({"tensor_shape": (3, 2)}, "invalid tensor: cannot reshape"),
        ({"tensor_content": b"12345"}, "invalid tensor: buffer size must be"),
        ({"tensor_content": np.full((2, 2), np.nan, np.float32).tobytes()}, "scores that are not finite"),
    ],
)
def test_a_tensor_that_is_none_is_one_clear_error(service, changes, words):
    service, client = service

    def change(response) -> None:
        tensor = response.outputs["scores"]
        tensor.dtype = changes.get("dtype", tensor.dtype)
        tensor.tensor_content = changes.get("tensor_content", tensor.tensor_content)
        for size, dim in zip(changes.get("tensor_shape", ()), tensor.tensor_shape.dim, strict=False):
            dim.size = size

    service.change = change
    with pytest.raises(ServingError, match=words):
        client.classify(IMAGES)


def test_a_label_that_is_no_text_is_one_clear_error(service):
    service, client = service
    service.change = lambda response: response.outputs["labels"].string_val.__setitem__(0, b"\xff")
    with pytest.raises(ServingError, match="a label that is not UTF-8"):
        client.classify(IMAGES)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.given(
    number=strategies.integers(-1, 12),
    sizes=strategies.lists(strategies.integers(-2, 2**62) | strategies.integers(0, 3), max_size=70),
    content=strategies.binary(max_size=9),
    values=strategies.lists(strategies.integers(-(2**31), 2**31 - 1), max_size=5),
    strings=strategies.lists(strategies.binary(max_size=2), max_size=3),
)
def test_a_tensor_message_is_an_array_or_a_value_error(number, sizes, content, values, strings):
    tensor = messages.CLASSES["Tensor"](dtype=number, tensor_content=content, int_val=values, string_val=strings)
    for size in sizes:
        tensor.tensor_shape.dim.add(size=size)
    with contextlib.suppress(ValueError, OverflowError):
        assert messages.to_array(tensor).shape == tuple(sizes)


def test_messages_have_the_official_fields():
    """Every field of ours is in the official message under its number, name and type."""
    core = {"Tensor": tf.make_tensor_proto(0).DESCRIPTOR, "Example": tf.train.Example.DESCRIPTOR}
    core |= {name: getattr(tf.train, name).DESCRIPTOR for name in ("Features", "Feature", "BytesList")}
    core["TensorShape"] = core["Tensor"].fields_by_name["tensor_shape"].message_type
    core["Dim"] = core["TensorShape"].nested_types_by_name["Dim"]
    for name, message in messages.CLASSES.items():
        theirs = core[name] if name in core else official(name).DESCRIPTOR
        for field in message.DESCRIPTOR.fields:
            there = theirs.fields_by_name[field.name]
            assert (there.number, there.is_repeated) == (field.number, field.is_repeated), f"{name}.{field.name}"
            # An enumeration and an int32 are the same on the wire.
            assert there.type == field.type or (there.type, field.type) == (there.TYPE_ENUM, field.TYPE_INT32)


# The server's files


def versions(place: pathlib.Path, *numbers: int) -> pathlib.Path:
    for number in numbers:
        (place / str(number)).mkdir(parents=True)
        (place / str(number) / "saved_model.pb").touch()
    return place


def kit(tmp_path: pathlib.Path, **changes) -> pathlib.Path:
    values = {"models": str(tmp_path / "served"), "name": "birds", "output": str(tmp_path / "kit"), **changes}
    return configuration.write_kit(KitOptions(**values))


def test_a_kit_names_the_versions_and_their_labels(tmp_path):
    versions(tmp_path / "served", 1, 2, 10)
    path = kit(tmp_path, stable=2, canary=10, max_batch_size=16, batch_timeout_ms=0.5)
    assert {entry.name for entry in path.iterdir()} == {
        "models.config", "batching.config", "compose.yaml", "README.md", "client",
    }  # fmt: skip
    config = text_format.Parse((path / "models.config").read_text(), official("ModelServerConfig")())
    (model,) = config.model_config_list.config
    assert (model.name, model.base_path, model.model_platform) == ("birds", "/models/birds", "tensorflow")
    assert list(model.model_version_policy.specific.versions) == [2, 10]
    assert dict(model.version_labels) == {"stable": 2, "canary": 10}
    assert (path / "batching.config").read_text().split("\n")[:2] == [
        "max_batch_size { value: 16 }",
        "batch_timeout_micros { value: 500 }",
    ]
    compose = (path / "compose.yaml").read_text()
    for words in (
        "--model_config_file=/config/models.config",
        f'"{tmp_path / "served"}"',
        "/models/birds",
        '"8500:8500"',
    ):
        assert words in compose


@pytest.mark.parametrize(
    "folder", ['my "best" models', "$HOME and ${HOME}", "C:\\new", "a: b # c", "'\u017bubr' \U0001f426"]
)
def test_any_path_of_models_is_the_one_that_is_mounted(folder, tmp_path):
    versions(tmp_path / folder, 1)
    compose = (kit(tmp_path, models=str(tmp_path / folder)) / "compose.yaml").read_text()
    (source,) = re.findall(r'^ *source: (".*")$', compose, re.MULTILINE)
    # A text in double quotes is the same in YAML as in JSON.
    assert json.loads(source).replace("$$", "\0").count("$") == 0
    assert json.loads(source).replace("$$", "$") == str(tmp_path / folder)


def test_a_path_that_no_text_can_state_is_one_sentence(tmp_path):
    versions(tmp_path / "a\nb", 1)
    with pytest.raises(UserError, match="has characters that a compose file cannot hold"):
        kit(tmp_path, models=str(tmp_path / "a\nb"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a\nb"]


def test_a_name_that_is_a_number_is_a_text_in_the_compose_file():
    assert 'services:\n  "123":\n' in configuration.compose_file("123", pathlib.Path("/served"))


def test_the_newest_version_is_stable_by_default(tmp_path):
    versions(tmp_path / "served", 9, 10)
    path = kit(tmp_path)
    config = text_format.Parse((path / "models.config").read_text(), official("ModelServerConfig")())
    assert dict(config.model_config_list.config[0].version_labels) == {"stable": 10}


def test_the_client_of_a_kit_works_by_itself(tmp_path, server):
    versions(tmp_path / "served", 1)
    path = kit(tmp_path)
    script = (
        "import sys; from client import RestClient; "
        "print(RestClient(sys.argv[1], 'birds').classify([b'x', b'y'])[0][0].label, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, server.url], cwd=path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("wren False\n", "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": "nowhere"}, "There is no folder .nowhere.; pass the --output of"),
        ({"models": "."}, "has no version of a model, such as 1; export one there first"),
        ({"name": ".."}, "--name takes letters, digits, '_', '.' and '-', but is '..'"),
        ({"name": "a/b"}, "--name takes letters, digits, '_', '.' and '-', but is 'a/b'"),
        ({"canary": 3}, "--canary is 3, but .* has 1; pass one of them"),
        ({"stable": 0}, "--stable is 0, but"),
        ({"output": "served"}, "served is not empty; pass a new --output"),
    ],
)
def test_a_kit_that_cannot_serve_is_one_sentence(tmp_path, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    versions(tmp_path / "served", 1)
    with pytest.raises(UserError, match=words):
        kit(tmp_path, **changes)
    assert [entry.name for entry in tmp_path.iterdir()] == ["served"]
