"""The REST client against servers with the documented JSON, and the files of a server."""

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

import hypothesis
import pytest
from google.protobuf import text_format
from hypothesis import strategies

from export.options import KitOptions
from export.serving import client as client_module
from export.serving.client import Prediction, RestClient, ServingError
from export.serving.kit import write_kit
from keras_vit import UserError
from tests.support import official, running

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
    with running(server):
        yield server


def test_rest_asks_in_the_documented_form_and_reads_the_answer(server):
    assert RestClient(server.url, "birds").classify(IMAGES) == RANKINGS
    files = [{"b64": "/9ggYSBKUEVH"}, {"b64": "iVBORyBhbm90aGVy"}]
    body = {"signature_name": "serving_default", "inputs": {"image_bytes": files}}
    assert server.requests == [("POST", "/v1/models/birds:predict", body)]


def test_rest_asks_a_version_by_number_or_by_label_behind_a_proxy(server):
    RestClient(f"{server.url}/vision/", "a b", version=3).classify(IMAGES)
    RestClient(server.url, "birds", version="stable").classify(IMAGES)
    assert [path for _, path, _ in server.requests] == [
        "/vision/v1/models/a%20b/versions/3:predict",
        "/v1/models/birds/labels/stable:predict",
    ]


def test_rest_sends_numbers_and_returns_a_single_output(server):
    server.answers = [(200, {"outputs": [[1.5, -2.0], [0.25, 1e-8]]}, 0)]
    client = RestClient(server.url, "birds")
    assert client.features(IMAGES) == [[1.5, -2.0], [0.25, 1e-8]]
    client.predict({"image": [[[0.5]]]}, "image_tensor")
    assert server.requests[1][2] == {"signature_name": "image_tensor", "inputs": {"image": [[[0.5]]]}}
    with pytest.raises(ValueError, match="JSON"):
        client.predict({"image": [float("nan")]}, "image_tensor")


@pytest.mark.parametrize(
    ("status", "content", "words"),
    [
        (400, {"error": "image_bytes[1]: no whole JPEG"}, r"answered 400: image_bytes\[1\]: no whole"),
        (404, {"error": "Servable not found"}, "answered 404: Servable not found"),
        (500, b"boom", "answered 500: boom"),
        (200, b"<html>", "answered 200: <html>"),
        (200, b"[" * 10**5, "answered 200"),
        (200, {"predictions": []}, "without outputs"),
        (200, {"outputs": {"logits": [[1.0]]}}, "labels, classes and scores"),
        (200, {"outputs": ANSWER | {"scores": [[0.75], [0.5, 0.25]]}}, "labels, classes and scores"),
        (200, {"outputs": {name: rows[:1] for name, rows in ANSWER.items()}}, "one row for each of 2 images"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_not_retried(server, status, content, words):
    server.answers = [(status, content, 0)]
    with pytest.raises(ServingError, match=words):
        RestClient(server.url, "birds").classify(IMAGES)
    assert len(server.requests) == 1


def test_rest_tries_an_overloaded_server_again_and_gives_up_after_its_attempts(server):
    server.answers = [(503, {"error": "busy"}, 0), (429, b"slow down", 0), (200, {"outputs": ANSWER}, 0)]
    assert RestClient(server.url, "birds").classify(IMAGES) == RANKINGS
    server.answers = [(503, {"error": "busy"}, 0)]
    with pytest.raises(ServingError, match="answered 503: busy") as caught:
        RestClient(server.url, "birds", attempts=2).classify(IMAGES)
    assert caught.value.status == 503
    assert len(server.requests) == 5
    server.answers = [(200, {"outputs": ANSWER}, 0.5)]
    with pytest.raises(ServingError, match="cannot be reached .*timed out"):
        RestClient(server.url, "birds", timeout=0.1, attempts=1).classify(IMAGES)


def test_an_unreachable_server_is_reported_with_its_address():
    with pytest.raises(ServingError, match="http://127.0.0.1:1/.* cannot be reached .*refused"):
        RestClient("http://127.0.0.1:1", "birds", attempts=1).classify(IMAGES)
    with pytest.raises(ValueError, match="url must be like http://localhost:8501"):
        RestClient("localhost:8501", "birds")


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


def test_an_endless_response_is_not_read_to_its_end(talker, monkeypatch):
    monkeypatch.setattr(client_module, "_LARGEST", 10**5)
    talker.said = [b"HTTP/1.1 200 OK\r\n\r\n", *[b"7" * 10_000] * 10**3]
    with pytest.raises(ServingError, match="answered 200: 777"):
        RestClient(talker.url, "birds").classify(IMAGES)


TEXT = strategies.text(max_size=4)
JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | TEXT,
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(TEXT, inner),
)
OUTPUTS = strategies.fixed_dictionaries(
    {}, optional={name: strategies.sampled_from([rows, rows[:1], rows[0]]) | JSON for name, rows in ANSWER.items()}
)


@strategies.composite
def answers(draw) -> bytes:
    """What a server may send: a status, and JSON of any kind, with some bytes changed or cut off."""
    of_any_kind = JSON | strategies.fixed_dictionaries({"outputs": OUTPUTS | JSON})
    body = draw(strategies.builds(json.dumps, of_any_kind)).encode()
    status = draw(strategies.sampled_from([b"200 OK", b"200 OK", b"400 Bad", b"404 Not", b"503 Busy", b"999 ?"]))
    framings = [b"", b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked", b"X: \xff"]
    framing = draw(strategies.sampled_from(framings))
    if b"chunked" in framing:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    content = bytearray(b"HTTP/1.1 " + status + b"\r\n" + framing + b"\r\n\r\n" + body)
    change = strategies.tuples(strategies.integers(0, 999), strategies.binary(max_size=2))
    for position, byte in draw(strategies.lists(change, max_size=3)):
        start = position % (len(content) + 1)
        content[start : start + 1] = byte
    return bytes(content[: draw(strategies.sampled_from([None, None, 60, 90]))])


@hypothesis.settings(
    max_examples=50, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(said=answers())
def test_any_response_is_an_answer_or_a_documented_error(talker, said):
    talker.said = [said]
    client = RestClient(talker.url, "birds", attempts=1, timeout=5.0)
    with contextlib.suppress(ServingError):
        assert len(client.classify(IMAGES)) == len(IMAGES)


# The server's files


def versions(place: pathlib.Path, *numbers: int) -> pathlib.Path:
    for number in numbers:
        (place / str(number)).mkdir(parents=True)
        (place / str(number) / "saved_model.pb").touch()
    return place


def kit(tmp_path: pathlib.Path, **changes) -> pathlib.Path:
    values = {"models": str(tmp_path / "served"), "name": "birds", "output": str(tmp_path / "kit"), **changes}
    return write_kit(KitOptions(**values))


def served_model(kit: pathlib.Path):
    config = text_format.Parse((kit / "models.config").read_text(), official("ModelServerConfig")())
    return config.model_config_list.config[0]


def test_a_kit_names_the_versions_and_their_labels(tmp_path):
    versions(tmp_path / "served", 1, 2, 10)
    path = kit(tmp_path, name="123", stable=2, canary=10)
    names = {"models.config", "batching.config", "compose.yaml", "README.md", "client.py"}
    assert {entry.name for entry in path.iterdir()} == names
    model = served_model(path)
    assert (model.name, model.base_path, model.model_platform) == ("123", "/models/123", "tensorflow")
    assert list(model.model_version_policy.specific.versions) == [2, 10]
    assert dict(model.version_labels) == {"stable": 2, "canary": 10}
    assert "\nmax_batch_size { value: 32 }\n" in (path / "batching.config").read_text()
    compose = (path / "compose.yaml").read_text()
    place, command = f'"{tmp_path / "served"}"', "--model_config_file=/config/models.config"
    assert all(words in compose for words in (command, place, 'services:\n  "123":\n', "/models/123", '"8500:8500"'))


@pytest.mark.parametrize(
    "folder", ['my "best" models', "$HOME and ${HOME}", "C:\\new", "a\nb: c # d", "'\u017bubr' \U0001f426"]
)
def test_any_path_of_models_is_the_one_that_is_mounted(folder, tmp_path):
    versions(tmp_path / folder, 1)
    compose = (kit(tmp_path, models=str(tmp_path / folder)) / "compose.yaml").read_text()
    (source,) = re.findall(r'^ *source: (".*")$', compose, re.MULTILINE)
    # A text in double quotes is the same in YAML as in JSON.
    assert json.loads(source).replace("$$", "\0").count("$") == 0
    assert json.loads(source).replace("$$", "$") == str(tmp_path / folder)


def test_the_newest_version_is_stable_by_default(tmp_path):
    versions(tmp_path / "served", 9, 10)
    assert dict(served_model(kit(tmp_path)).version_labels) == {"stable": 10}


def test_the_client_of_a_kit_works_by_itself(tmp_path, server):
    versions(tmp_path / "served", 1)
    path = kit(tmp_path)
    script = (
        "import sys; from client import RestClient; "
        "print(RestClient(sys.argv[1], 'birds').classify([b'x', b'y'])[0][0].label, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, server.url], cwd=path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("wren False\n", "")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": "nowhere"}, "There is no folder .nowhere.; pass the --output of"),
        ({"models": "."}, "has no version of a model, such as 1; export one there first"),
        ({"name": ".."}, "--name accepts letters, digits, '_', '.' and '-', but is '..'"),
        ({"name": "a/b"}, "--name accepts letters, digits, '_', '.' and '-', but is 'a/b'"),
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
