"""Download a file over HTTP: whole, checked against the checksums that its server states, or not at all.

`keras.utils.get_file` has no timeout, does not read the checksums of a server, and follows redirects to http.
"""

import base64
import contextlib
import hashlib
import http.client
import pathlib
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from keras_vit.errors import UserError
from keras_vit.files.atomic import atomic_write

_TIMEOUT = 30.0  # seconds, for the connection and for each read
PAUSES = (0.5, 2.0)  # seconds before the second and the third attempt
_CHUNK = 2**20  # bytes
_SPARE = 2**26  # bytes of disk space that a download leaves free
# How files begin; some servers return an HTML page instead of an error.
_BEGINNINGS = {".npz": rb"PK\x03\x04|PK\x05\x06", ".safetensors": rb".{8}\{"}
_NO_PAGE = rb"(?!(\xef\xbb\xbf)?\s*<)"


def is_local(address: str) -> bool:
    """Whether an address is one of a server on this machine."""
    parts = urllib.parse.urlsplit(address)
    return parts.scheme == "http" and parts.hostname in ("localhost", "127.0.0.1")


class TransferError(Exception):
    """A failure of the server or the network."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


def download_file(address: str, path: pathlib.Path) -> str:
    """Download to a path, where nothing is until the file is complete, and return its SHA-256. Raises UserError."""
    for pause in (*PAUSES, None):
        try:
            return _attempt(address, path)
        except TransferError as failure:
            if pause is None or not failure.retry:
                raise UserError(
                    f"{address} cannot be downloaded ({failure}); download it elsewhere and put the file at {path}."
                ) from failure
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _attempt(address: str, path: pathlib.Path) -> str:
    import tqdm  # lazy: only downloads need it

    checksums, received, chunk = _checksums(), 0, b""
    with atomic_write(path) as temporary, open(temporary, "xb") as stream, opened(address) as response:
        size, free = response.length, shutil.disk_usage(path.parent).free - _SPARE
        if size is None and not response.chunked:  # chunked: Google's compressed files
            raise TransferError("the server does not say its size", retry=False)
        with tqdm.tqdm(
            total=size, desc=path.name, unit="B", unit_scale=True, unit_divisor=1024, disable=None
        ) as progress:
            while True:
                if max(size or 0, received) > free:
                    raise TransferError(
                        f"it is larger than the {max(free, 0)} bytes of free space on the disk of {path.parent}",
                        retry=False,
                    )
                with _network_errors():
                    chunk = response.read(_CHUNK)
                if not chunk:
                    break
                if not received and not re.match(_BEGINNINGS.get(path.suffix, _NO_PAGE), chunk, re.DOTALL):
                    raise TransferError(f"it is no {path.suffix} file, but begins with {chunk[:40]!r}", retry=False)
                received += len(chunk)
                stream.write(chunk)
                for checksum in checksums.values():
                    checksum.update(chunk)
                progress.update(len(chunk))
        if size is not None and received != size:
            raise TransferError(f"it ended after {received} of {size} bytes", retry=True)
        digests = {name: checksum.digest().hex() for name, checksum in checksums.items()}
        for name, stated in _stated_checksums(response.headers).items():
            if digests.get(name, stated) != stated:
                raise TransferError(f"its {name} is {digests[name]}, but the server states {stated}", retry=True)
    return digests["sha256"]


def _checksums() -> dict[str, Any]:
    """Those that servers state, each with `update` and `digest`."""
    checksums: dict[str, Any] = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with contextlib.suppress(ImportError):  # comes with the training libraries; the models do without them
        import google_crc32c  # lazy: only downloads and TFRecord files need it

        checksums["crc32c"] = google_crc32c.Checksum()
    return checksums


def _stated_checksums(headers: http.client.HTTPMessage) -> dict[str, str]:
    """Checksums that Google Cloud Storage or Hugging Face states of a file by name, hexadecimal."""
    checksums: dict[str, str] = {}
    # Those of Google are of the compressed object, if it is; composite objects have no MD5.
    if headers.get("X-Goog-Stored-Content-Encoding", "identity") == "identity":
        stated = ",".join(headers.get_all("X-Goog-Hash", []))
        pairs = re.findall(r"\b(md5|crc32c)=([\w+/]{22}==|[\w+/]{6}==)", stated, re.ASCII)
        checksums = {name: base64.b64decode(value).hex() for name, value in pairs}
    # The ETag of a small file of Hugging Face is a Git hash.
    tag = headers.get("X-Linked-Etag") or (headers.get("ETag") if "X-Repo-Commit" in headers else None)
    if sha256 := re.fullmatch(r'"?([0-9a-f]{64})"?', tag or ""):
        checksums["sha256"] = sha256[1]
    return checksums


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    linked_etag: str | None = None  # Hugging Face states the hash in the answer that redirects to the storage

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        stays_local = is_local(req.full_url) and is_local(newurl)
        if urllib.parse.urlsplit(newurl).scheme != "https" and not stays_local:
            fp.close()
            raise TransferError(f"it redirects to {newurl[:200]!r}, which is not https", retry=False)
        self.linked_etag = headers.get("X-Linked-Etag", self.linked_etag)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def opened(address: str) -> Iterator[http.client.HTTPResponse]:
    """Yield the response of a server. Raises TransferError."""
    redirects = _SafeRedirects()
    with _network_errors():
        response = urllib.request.build_opener(redirects).open(address, timeout=_TIMEOUT)
    if redirects.linked_etag:
        response.headers["X-Linked-Etag"] = redirects.linked_etag
    with response:
        yield response


@contextlib.contextmanager
def _network_errors() -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        retry = error.code in (408, 429) or error.code >= 500
        raise TransferError(f"{error.code} {error.reason}", retry=retry) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
        raise TransferError(reason, retry=not isinstance(error, ValueError)) from error


def sha256_of(path: pathlib.Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as stream:
        sha256 = hashlib.sha256()
        while chunk := stream.read(_CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()
