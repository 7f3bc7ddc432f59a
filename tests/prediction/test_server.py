"""The page that classifies what is dropped on it, and what foreign pages and odd clients get from it."""

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request

import keras
import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_vit
from keras_vit import UserError, inspection
from keras_vit.images.formats import LARGEST_SERVED
from keras_vit.run import Run
from tests.support import answering, encoded
from training.prediction.classifier import open_classifier
from training.prediction.server import _CONNECTIONS, open_server


class Decoder:
    """Answers with the size of an image."""

    def answer(self, data: bytes, name: str) -> str:
        return f"{name} {inspection.decode(data, name, most_pixels=LARGEST_SERVED).pixels.shape}"

    def values(self, data: bytes, name: str) -> dict:
        return {"size": self.answer(data, name)}


@pytest.fixture(name="port", scope="module")
def _port():
    server = open_server(Decoder(), 0)
    with answering(server):
        yield int(server.effective_port)


def image(size=(3, 2)) -> bytes:
    return encoded(PIL.Image.new("1", size))


def answer(port: int, data: bytes | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of a request."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def sent(port: int, data: bytes) -> bytes:
    """The first bytes that answer what is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with contextlib.suppress(OSError):  # the server may answer and close before it has read all
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(100)


def test_the_page_classifies_what_is_sent_to_it(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "model.keras")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8)
    logits = np.asarray(tiny_model(np.asarray(keras_vit.preprocessing_of(tiny_model)(pixels))[None]))[0]
    (tmp_path / "names.txt").write_text("".join(f"class {number}\n" for number in range(7)))
    classifier = open_classifier(Run.open(tmp_path / "model.keras"), str(tmp_path / "names.txt"), explain="rollout")
    server = open_server(classifier, 0)
    with answering(server):
        assert "Drop an image here" in answer(int(server.effective_port))[1]
        json_text = answer(int(server.effective_port), encoded(pixels), Accept="application/json")[1]
        status, page = answer(int(server.effective_port), encoded(pixels), **{"X-Name": "my%20cat.png"})
    assert status == 200
    assert "my cat.png" in page
    best, second = np.argsort(-logits)[:2]
    assert page.index(f"class {best}") < page.index(f"class {second}")
    assert [each["class"] for each in json.loads(json_text)["classes"][:2]] == [f"class {best}", f"class {second}"]
    keras.backend.clear_session()


def test_a_port_in_use_is_named(port):
    with pytest.raises(UserError, match=f"Port {port} cannot be used .Address already in use"):
        open_server(Decoder(), port)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),
        ({"Host": "elsewhere.example"}, 403),
        ({"Host": "127.0.0.1.elsewhere.example:80"}, 403),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
    ],
)
def test_foreign_pages_are_refused(port, headers, status):
    assert answer(port, image(), **headers)[0] == status


def test_names_and_images_are_limited(port):
    assert answer(port, image(), **{"X-Name": "%C3%A4" * 1000}) == (200, "ä" * 150 + " (2, 3, 1)")
    assert answer(port, b"no image")[0] == 422
    status, text = answer(port, b"no image", Accept="application/json")
    assert status == 422
    assert "error" in json.loads(text)
    status, text = answer(port, image((4000, 8001)))
    assert status == 422
    assert "32,004,000 pixels, and at most 32,000,000 are read" in text


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"Content-Length: " + b"1" * 5000, b"400"),
        (b"Content-Length: " + str(2**40).encode(), b"413"),
        (b"Content-Length: -1", b"400"),
        ("Content-Length: ²".encode("latin-1"), b"400"),
        (b"X: " + b"x" * 300_000, b"431"),
    ],
    ids=["5000 digits", "large", "negative", "no digit", "long"],
)
def test_headers_that_no_browser_sends_are_refused_in_silence(port, request_, status, capfd):
    assert sent(port, b"POST / HTTP/1.0\r\nHost: 127.0.0.1\r\n" + request_ + b"\r\n\r\n").split()[1] == status
    assert capfd.readouterr().err == ""


def test_half_sent_requests_take_no_threads_and_do_not_stop_others(monkeypatch, capfd):
    monkeypatch.setattr("training.prediction.server._SILENCE", 1)
    server = open_server(Decoder(), 0)
    place = ("127.0.0.1", int(server.effective_port))
    with answering(server), contextlib.ExitStack() as stack:
        threads = threading.active_count()
        for _ in range(2 * _CONNECTIONS):
            connection = stack.enter_context(socket.create_connection(place, timeout=60))
            connection.sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nx")
        assert threading.active_count() == threads
        for _ in range(20):  # clients that leave before the answer
            with socket.create_connection(place, timeout=60) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert answer(place[1], image())[0] == 200
    assert capfd.readouterr().err == ""


HEADERS = st.lists(
    st.tuples(
        st.sampled_from(["Content-Length", "Host", "Origin", "Transfer-Encoding", "X-Name", "Expect", "Connection"]),
        st.one_of(
            st.sampled_from(["127.0.0.1", "chunked", "0", "9", "100-continue", "keep-alive", "%00%ff", "1" * 4400]),
            st.text(st.characters(codec="latin-1"), max_size=20),
        ),
    ),
    max_size=5,
)


@given(
    st.sampled_from(["GET", "POST", "HEAD", "PUT", "\0", ""]),
    st.sampled_from(["/", "*", "http://x/", "/" * 5000, "/%"]),
    HEADERS,
    st.binary(max_size=40) | st.just(image()),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_request_is_answered_or_closed(port, method, path, headers, body):
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    found = sent(port, "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body)
    assert found == b"" or found.startswith((b"HTTP/1.", b"HTTP/1.1 100"))
    assert b" 500 " not in found
