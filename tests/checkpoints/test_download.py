"""find_checkpoint: names, addresses, the cache and failed downloads. No network but 127.0.0.1."""

import base64
import collections
import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import shutil
import signal
import socket
import threading
import time
import types
import urllib.parse

import google_crc32c
import pytest

from keras_vit import UserError
from keras_vit.checkpoints.find import best_upstream, find_checkpoint
from keras_vit.files import transfer
from tests.support import running, without_pauses

STORAGE = "https://storage.googleapis.com"
CONTENT = b"PK\x03\x04" + bytes(range(251)) * 13_007  # more than three reads, not a power of two


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests = collections.Counter()
        self.times: list[float] = []
        self.interrupt = lambda: None
        self.together = threading.Barrier(2)

    def address(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content)), "Connection": "close"} | headers).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client may have closed the connection
            self.wfile.write(content)
        self.close_connection = True

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.requests[path] += 1
        self.server.times.append(time.monotonic())
        first = self.server.requests[path] == 1
        length = {"Content-Length": str(len(CONTENT))}
        answers = {
            "/complete/model.npz": (200, CONTENT), "/short-once.npz": (200, CONTENT), "/forbidden.npz": (403,),
            "/busy-once.npz": (503, b"later") if first else (200, CONTENT),
        }  # fmt: skip
        redirects = {"/linked.npz": "/complete/model.npz", "/near.npz": "/complete/model.npz"}
        redirects |= {"/far.npz": "http://example.com/model.npz"}
        if path == "/short.npz" or (path == "/short-once.npz" and first):
            self.answer(200, CONTENT[:1_500_000], **length)
        elif path in answers:
            self.answer(*answers[path])
        elif path in redirects:
            self.answer(302, Location=redirects[path], **({"X_Linked_Etag": query} if query else {}))
        elif path == "/together.npz":
            self.server.together.wait(10)
            self.answer(200, CONTENT)
        elif path in ("/silent.npz", "/interrupted.npz"):
            self.answer(200, b"begin" if path == "/silent.npz" else CONTENT[:1_500_000], **length)
            self.wfile.flush()
            if path == "/interrupted.npz":
                self.server.interrupt()
            threading.Event().wait(2)
        elif path.startswith("/hashed/"):  # the hashes stand in the query
            self.answer(200, CONTENT, **dict(urllib.parse.parse_qsl(query)))
        elif path in ("/chunked.npz", "/chunked-short.npz", "/endless.npz"):
            chunk = b"%x\r\n%s\r\n" % (len(CONTENT), CONTENT)
            self.send_response(200)
            self.send_header(*(("Connection", "close") if "endless" in path else ("Transfer-Encoding", "chunked")))
            self.end_headers()
            endings = {"/chunked.npz": chunk + b"0\r\n\r\n", "/chunked-short.npz": chunk[:1_500_000]}
            self.wfile.write(endings.get(path, CONTENT))
            self.close_connection = True
        elif path.startswith("/page"):
            self.answer(200, b"\n<!DOCTYPE html><title>Sign in</title>")
        else:
            self.answer(404, b"no such object")


@pytest.fixture(name="server")
def _server():
    with running(_Server()) as server:
        yield server


@pytest.fixture(name="cache", autouse=True)
def _cache(tmp_path, monkeypatch) -> pathlib.Path:
    """A cache in tmp_path, with access to 127.0.0.1 only and no pauses."""
    resolve = socket.getaddrinfo

    def resolve_local(host, *arguments, **options):
        if host != "127.0.0.1":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_local)
    without_pauses(monkeypatch)
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.upper(), raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KERAS_VIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cached_files(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def error_message(name: str, cache: pathlib.Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        find_checkpoint(name, cache)
    return str(caught.value)


def place_manually(name: str, content: bytes) -> pathlib.Path:
    """Put a file at the path in the error message without a network."""
    path = pathlib.Path(error_message(name).split("put the file at ")[1].removesuffix("."))
    path.write_bytes(content)
    return path


# Local paths


def test_a_local_path_is_itself_even_under_an_official_name(tmp_path, cache):
    (tmp_path / "model.npz").write_bytes(b"weights")
    assert find_checkpoint(tmp_path / "model.npz") == tmp_path / "model.npz"
    assert find_checkpoint(str(tmp_path)) == tmp_path
    pathlib.Path("sam").mkdir()
    pathlib.Path("sam/ViT-B_16").write_bytes(b"mine")
    assert find_checkpoint("sam/ViT-B_16").read_bytes() == b"mine"
    assert not cache.exists()


# Names


B_16 = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
FINE = f"{B_16}--imagenet2012-steps_20k-lr_0.03-res_384"


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("imagenet21k/R50+ViT-B_16", "vit_models/imagenet21k/R50%2BViT-B_16.npz"),
        ("imagenet21k+imagenet2012/ViT-B_16-224", "vit_models/imagenet21k%2Bimagenet2012/ViT-B_16-224.npz"),
        ("gsam/ViT-S_32", "vit_models/gsam/ViT-S_32.npz"),
        (f"augreg:{B_16}", f"vit_models/augreg/{B_16}.npz"),
        (f"augreg:{FINE}.npz", f"vit_models/augreg/{FINE}.npz"),
        ("bit:BiT-M-R50x1", "bit_models/BiT-M-R50x1.npz"),
        ("bit:vtab/BiT-M-R101x3-run2-dsprites-xpos", "bit_models/vtab/BiT-M-R101x3-run2-dsprites-xpos.npz"),
        ("big_vision:vit_s16_i1k_300ep", "big_vision/vit_s16_i1k_300ep.npz"),
        (pathlib.Path("gs://vit_models/sam/ViT-B_16.npz"), "vit_models/sam/ViT-B_16.npz"),
        ("gs://bucket/a b?#%é.npz", "bucket/a%20b%3F%23%25%C3%A9.npz"),
    ],
)
def test_a_name_becomes_an_address(name, address):
    assert error_message(name).startswith(f"{STORAGE}/{address} cannot be downloaded (")


def test_equivalent_addresses_have_one_cache_path():
    path = place_manually("sam/ViT-B_16", CONTENT)
    same = ("gs://vit_models/sam/ViT-B_16.npz", f"{STORAGE}/vit_models/sam/ViT-B_16.npz#part")
    assert {find_checkpoint(name) for name in same} == {path}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("imagenet21k/ViT-B_61", "imagenet21k/ViT-B_16"),
        ("ViT-B_16", "like imagenet21k/ViT-B_16, imagenet21k+imagenet2012/ViT-B_16, sam/ViT-B_16, gsam/ViT-B_16."),
        ("BiT-M-R50x1.npz", "like bit:BiT-M-R50x1."), ("", "augreg:B_16"),
        ("augreg:../../index.csv", "augreg:"), (f"augreg:{B_16}/../x", "augreg:"),
        ("bit:BiT-L-R50x1", "bit:BiT-M-R50x1"),
        ("bit:vtab/BiT-M-R152x2-run0-svhn", "bit:vtab/BiT-M-R152x4-run0-svhn"),
        ("big_vision:vit_s16_i1k_30ep", "big_vision:vit_s16_i1k_300ep"), ("xyzzy", "augreg:B_16"),
        ("model\0.npz", ""), ("model\udcff.npz", ""), ("x" * 100_000, "augreg:B_16"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest_official_ones(name, near, cache):
    sentence = error_message(name)
    found, advice = sentence.split("; give an existing path, an https:// or gs:// address, ")
    assert found == f"There is no file, folder or official checkpoint {name[:200]!r}"
    assert near in advice
    assert len(advice.split(" like ")[1].split(", ")) <= 5
    assert len(sentence) < 700
    assert not cache.exists()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("runs/fin", "did you mean runs/fine?"),
        ("run/", "did you mean runs?"),
        ("runs/xyzzy", "check the path."),
        ("runs/fin\0", "did you mean runs/fine?"),
        ("/no/such/folder/of/mine.npz", "check the path."),
        ("google/vit-base", "check the path, or give hf:google/vit-base for a model of the Hugging Face hub."),
    ],
)
def test_a_path_that_does_not_exist_is_answered_with_its_nearest_neighbor(name, advice, tmp_path, monkeypatch):
    (tmp_path / "runs" / "fine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert error_message(name) == f"There is no file or folder {name!r}; {advice}"


@pytest.mark.parametrize(
    "name",
    [
        "http://example.com/model.npz", "ftp://example.com/model.npz", "file:///etc/passwd", "s3://bucket/model.npz",
        "http://127.0.0.1.example.com/model.npz", "https:///model.npz", "https://example.com/folder/", "gs://b/./x",
        "gs://bucket/", "https://", "https://example.com", "https://user:secret@example.com/model.npz",
        "https://[example.com/model.npz", "https://example.com/a/../b.npz", "https://example.com/%2e%2e",
        "https://example.com/model\0.npz", "https://example.com/model\r\nHost: b.npz",
        "https://example.com/..%2F..%2Fetc%2Fpasswd",
        "https://example.com/\udcff.npz", "gs://b/../../x", "gs://../x", "gs://bucket", "gs:///x",
        "gs://b/model\0.npz",
    ],
)  # fmt: skip
def test_an_address_that_is_not_safe_or_not_a_file_is_refused(name, cache):
    assert error_message(name).startswith("An address must be https://host/…/file or gs://bucket/…/file, without")
    assert not cache.exists()


# AugReg's index


COLUMNS = (
    "name,ds,epochs,lr,aug,wd,do,sd,best_val,final_val,final_test,adapt_ds,adapt_lr,adapt_steps,adapt_resolution,"
    "adapt_final_val,adapt_final_test,params,infer_samples_per_sec,filename,adapt_filename"
)


def index_of(*rows: tuple[str, str, str]) -> str:
    """An index.csv of (ds, final_val, filename)."""
    lines = [
        f'"X/16",{ds},300,0.001,none,0.1,0.0,0.0,0.99,{final_val},0.98,cifar100,0.03,500,384,'
        f"0.97,0.96,5.7e6,610.5,{filename},{filename}--cifar100-steps_0k-lr_0.03-res_384"
        for ds, final_val, filename in rows
    ]
    return "\n".join([COLUMNS, *lines]) + "\n"


INDEX = index_of(
    ("i21k", "0.45", "B_16-i21k-a"),
    ("i21k", "0.47", "B_16-i21k-b"),
    ("i21k", "0.47", "B_16-i21k-b"),  # one row per fine-tuned model
    ("i21k", "0.46", "B_16-i21k-c"),
    ("i21k", "", "B_16-i21k-unfinished"),
    ("i21k", "nan", "B_16-i21k-diverged"),
    ("i21k", "?", "B_16-i21k-strange"),
    ("i1k", "0.80", "B_16-i1k-a"),
    ("i21k_30", "0.90", "B_16-i21k_30-a"),
    ("i21k", "0.60", "R50_B_16-i21k-a"),
    ("i21k", "0.61", "B_16x-i21k-a"),
    ("i21k", "0.05", "S_16-i21k-a"),
    ("i21k", "0.5e-1", "S_16-i21k-equal"),
    ("i21k", "0.30", "Ti_16-i21k-a"),
    ("i21k", "9e-1", "Ti_16-i21k-b"),
    ("i21k", "0.95", "R_Ti_16-i21k-a"),
    ("i1k", "0.95", "L_16-i1k-a"),
)


@pytest.mark.parametrize(
    ("model", "file"), [("B_16", "B_16-i21k-b"), ("S_16", "S_16-i21k-a"), ("Ti_16", "Ti_16-i21k-b")]
)
def test_augreg_selects_the_best_upstream_file_of_the_model(model, file):
    assert best_upstream(INDEX, model) == file
    assert best_upstream(INDEX.replace("\n", "\r\n"), model) == file


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        (INDEX, "no i21k file of 'L_16'"),
        (index_of(("i21k", "", "L_16-i21k-a")), "no i21k file of 'L_16' with a final_val"),
        (f"{COLUMNS}\nL/16,i21k,300\n", "no i21k file of 'L_16'"),
        ("<html>Please log in</html>", "no i21k file of 'L_16'"),
        ("filename,other\nL_16,x\n", "cannot be read as CSV ('ds')"),
        (f"{COLUMNS}\n{'x' * 200_000}\n", "cannot be read as CSV (field larger"),
    ],
)
def test_an_index_without_the_model_is_refused(index, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        best_upstream(index, "L_16")


def test_an_augreg_model_goes_through_the_index_in_the_cache():
    place_manually("augreg:B_16", INDEX.encode())
    model = place_manually("augreg:B_16", CONTENT)
    assert find_checkpoint("augreg:B_16") == find_checkpoint("gs://vit_models/augreg/B_16-i21k-b.npz") == model


def test_a_name_in_the_index_cannot_leave_the_bucket():
    place_manually("augreg:B_16", index_of(("i21k", "0.5", "B_16-/../../../x")).encode())
    assert error_message("augreg:B_16").startswith("An address must be")


# Cache paths


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("https://example.com/R50+ViT-B_16.npz?key=/../../etc/x", "R50+ViT-B_16.npz"),
        ("https://example.com/%2Fetc%2Fpasswd", "_etc_passwd"),
        ("https://example.com/..%5C..%5Cx.npz", "_.._x.npz"),
        ("https://example.com/a%00b.npz", "a_b.npz"),
        ("https://example.com/...", "file"),
        ("https://example.com/été.npz", "_t_.npz"),
    ],
)
def test_a_cached_file_keeps_its_name_in_a_separate_folder(address, own, cache):
    path = place_manually(address, CONTENT)
    assert path.name == own
    assert path.resolve().parent.parent == cache.resolve()
    assert re.fullmatch("[0-9a-f]{20}", path.parent.name)
    assert find_checkpoint(address) == path


def test_a_very_long_name_is_cut_but_keeps_its_suffix(cache):
    first, second = (place_manually(f"https://example.com/{'x' * 3_000}{end}.npz", b"weights") for end in "ab")
    assert (len(first.name), first.suffix, first.parent.parent) == (160, ".npz", cache)
    assert first.parent != second.parent


def test_the_cache_is_the_argument_or_the_environment_variable_or_in_the_home(tmp_path, monkeypatch):
    name = "sam/ViT-B_16"
    assert f" {tmp_path / 'other'}/" in error_message(name, tmp_path / "other")
    assert f" {tmp_path / 'cache'}/" in error_message(name)
    monkeypatch.setenv("KERAS_VIT_CACHE", "~/mine")
    assert f" {tmp_path / 'home' / 'mine'}/" in error_message(name)
    monkeypatch.delenv("KERAS_VIT_CACHE")
    assert f" {tmp_path / 'home' / '.cache' / 'keras_vit'}/" in error_message(name)


# Downloads


def test_a_file_is_downloaded_once_with_metadata(server, cache):
    address = server.address("/complete/model.npz?key=secret")
    path = find_checkpoint(address)
    assert path.read_bytes() == CONTENT
    metadata_file = path.with_name("model.npz.json")
    assert cached_files(cache) == [path, metadata_file]
    metadata = json.loads(metadata_file.read_text())
    assert (metadata["address"], metadata["downloaded"]) == (server.address("/complete/model.npz"), True)
    assert (metadata["size"], metadata["sha256"]) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", metadata["date"])
    assert find_checkpoint(address) == path
    assert server.requests["/complete/model.npz"] == 1


@pytest.mark.parametrize("path", ["/short-once.npz", "/busy-once.npz"])
def test_a_transfer_that_fails_once_is_repeated_after_a_pause(path, server, monkeypatch):
    monkeypatch.setattr(transfer, "PAUSES", (0.1, 60.0))
    assert find_checkpoint(server.address(path)).read_bytes() == CONTENT
    first, second = server.times
    assert 0.1 <= second - first < 30


@pytest.mark.parametrize(
    ("path", "reason", "attempts"),
    [
        ("/short.npz", f"it ended after 1500000 of {len(CONTENT)} bytes", 3),
        ("/chunked-short.npz", "IncompleteRead", 3),
        ("/silent.npz", "timed out", 3),
        ("/missing.npz", "404 Not Found", 1),
        ("/forbidden.npz", "403 Forbidden", 1),
        ("/endless.npz", "the server does not say its size", 1),
        ("/far.npz", "it redirects to 'http://example.com/model.npz', which is not https", 1),
    ],
)
def test_a_failed_transfer_leaves_nothing_and_says_where_to_put_the_file(
    path, reason, attempts, server, cache, monkeypatch
):
    monkeypatch.setattr(transfer, "_TIMEOUT", 0.2)
    address = server.address(path)
    sentence = error_message(address)
    assert sentence.startswith(f"{address} cannot be downloaded ({reason}")
    assert cached_files(cache) == []
    assert server.requests[path] == attempts
    place_manually(address, b"by hand")
    assert find_checkpoint(address).read_bytes() == b"by hand"


def test_an_interrupted_transfer_leaves_nothing(server, cache):
    folders = set()

    def interrupt():
        folders.update(path.relative_to(cache).parts[-3:-1] for path in cached_files(cache) if path.suffix == ".npz")
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    server.interrupt = interrupt
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a process of the background
    try:
        with pytest.raises(KeyboardInterrupt):
            find_checkpoint(server.address("/interrupted.npz"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert [folder for folder, _ in folders] == [".building"]
    assert cached_files(cache) == []


@pytest.mark.parametrize("name", ["near.npz", "chunked.npz"])
def test_a_redirect_to_a_safe_address_and_chunks_are_followed(name, server):
    path = find_checkpoint(server.address(f"/{name}"))
    assert (path.name, path.read_bytes()) == (name, CONTENT)


SHA256, MD5 = hashlib.sha256(CONTENT).hexdigest(), base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
CRC32C = base64.b64encode(google_crc32c.Checksum(CONTENT).digest()).decode()
OTHER_SHA256, OTHER_MD5 = "0" * 64, base64.b64encode(bytes(16)).decode()


@pytest.mark.parametrize(
    ("headers", "is_kept"),
    [
        ({"X-Goog-Hash": f"crc32c={CRC32C},md5={MD5}"}, True),
        ({"X-Goog-Hash": f"crc32c={CRC32C},md5={OTHER_MD5}"}, False),
        ({"X-Goog-Hash": f"crc32c={CRC32C}"}, True),  # a composite object
        ({"X-Goog-Hash": "crc32c=AAAAAA=="}, False),
        ({"X-Goog-Hash": f"md5={OTHER_MD5}", "X-Goog-Stored-Content-Encoding": "gzip"}, True),  # of other bytes
        ({"X-Linked-Etag": f'"{SHA256}"'}, True),
        ({"X-Linked-Etag": f'"{OTHER_SHA256}"'}, False),
        ({"ETag": f'"{OTHER_SHA256}"', "X-Repo-Commit": "ab"}, False),
        ({"ETag": f'"{"0" * 40}"', "X-Repo-Commit": "ab"}, True),  # a Git hash
        ({"ETag": f'"{OTHER_SHA256}"'}, True),  # of a server whose ETags mean anything
    ],
)
def test_a_file_without_the_hash_that_its_server_publishes_is_not_kept(headers, is_kept, server, cache):
    address = server.address(f"/hashed/model.npz?{urllib.parse.urlencode(headers)}")
    if is_kept:
        assert find_checkpoint(address).read_bytes() == CONTENT
        return
    assert re.search(r"its (md5|sha256|crc32c) is \w+, but the server states 0+\)", error_message(address))
    assert server.requests["/hashed/model.npz"] == 3  # the transfer may have failed
    assert cached_files(cache) == []


def test_the_hash_in_a_redirect_is_compared_with_what_arrives(server, cache):
    assert find_checkpoint(server.address(f"/linked.npz?{SHA256}")).read_bytes() == CONTENT
    assert "but the server states" in error_message(server.address(f"/linked.npz?{OTHER_SHA256}"))


def test_concurrent_callers_each_get_the_complete_file(server, cache):
    found = {}

    def find(caller: int) -> None:
        found[caller] = find_checkpoint(server.address("/together.npz")).read_bytes()

    callers = [threading.Thread(target=find, args=(caller,)) for caller in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == {0: CONTENT, 1: CONTENT}
    assert len(cached_files(cache)) == 2


# One whose size is known is refused before its bytes arrive: those of the first never do.
@pytest.mark.parametrize("path", ["/silent.npz", "/chunked.npz"])
def test_a_file_larger_than_the_free_space_is_refused(path, server, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2**26 + 2**20))
    sentence = error_message(server.address(path))
    assert f"is larger than the {2**20} bytes of free space on the disk of" in sentence
    assert (cached_files(cache), server.requests[path]) == ([], 1)


@pytest.mark.parametrize("name", ["page.npz", "page.safetensors", "page.csv", "page"])
def test_an_html_page_is_not_kept_as_a_checkpoint(name, server, cache):
    sentence = error_message(server.address(f"/{name}"))
    assert "cannot be downloaded (it is no " in sentence
    assert "<!DOCTYPE html>" in sentence
    assert (cached_files(cache), server.requests[f"/{name}"]) == ([], 1)


# Without a network, and manually placed files


def test_a_manually_placed_file_is_used_and_marked_as_such():
    path = place_manually("sam/ViT-B_16", CONTENT)
    assert find_checkpoint("sam/ViT-B_16") == path
    metadata = json.loads(path.with_name("ViT-B_16.npz.json").read_text())
    assert (metadata["address"], metadata["downloaded"]) == (f"{STORAGE}/vit_models/sam/ViT-B_16.npz", False)
    assert (metadata["size"], metadata["sha256"]) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def test_a_damaged_file_of_the_cache_is_refused_until_the_user_decides(server):
    content = CONTENT[:-1] + b"!"
    address = server.address("/complete/model.npz")
    path = find_checkpoint(address)
    path.write_bytes(content)
    assert "should have the SHA-256" in error_message(address)
    path.with_name("model.npz.json").unlink()
    assert find_checkpoint(address).read_bytes() == content
    path.unlink()
    assert find_checkpoint(address).read_bytes() == CONTENT


def test_metadata_of_a_deleted_file_is_not_used_for_the_next_one():
    path = place_manually("sam/ViT-B_16", CONTENT)
    find_checkpoint("sam/ViT-B_16")
    path.unlink()
    assert place_manually("sam/ViT-B_16", b"another") == path
    assert find_checkpoint("sam/ViT-B_16").read_bytes() == b"another"


@pytest.mark.parametrize("metadata_file", [b"{", b"[]", b"\xff", b'{"size": 3}'])
def test_unreadable_metadata_is_rewritten(metadata_file):
    path = place_manually("sam/ViT-B_16", CONTENT)
    path.with_name("ViT-B_16.npz.json").write_bytes(metadata_file)
    assert find_checkpoint("sam/ViT-B_16") == path
    assert json.loads(path.with_name("ViT-B_16.npz.json").read_text())["size"] == len(CONTENT)
