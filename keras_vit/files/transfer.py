"""Download a file over HTTP: whole, checked against the checksums that its server states, or not at all."""

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
_HEAD = 512  # bytes that distinguish a file from an HTML page
_LOCAL = {"localhost", "127.0.0.1"}


def is_local(address: str) -> bool:
    """Whether an address is one of a server on this machine."""
    parts = urllib.parse.urlsplit(address)
    return parts.scheme == "http" and parts.hostname in _LOCAL


class TransferError(Exception):
    """A failure of the server or the network."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


def download_file(address: str, path: pathlib.Path, *, elsewhere: str) -> str:
    """Download to `path`, in up to three attempts, and return the SHA-256, hexadecimal.

    Args:
        address: https, or http on this machine.
        path: in a folder that exists. Nothing is there until the file is complete.
        elsewhere: what the user can do to use another disk, for the sentence about a full one.

    Raises UserError.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return _attempt(address, path, elsewhere)
        except TransferError as failure:
            pause = next(pauses, None)
            if pause is None or not failure.retry:
                raise UserError(
                    f"{address} cannot be downloaded ({failure}); download it elsewhere and put the file at {path}."
                ) from failure
            time.sleep(pause)


def _attempt(address: str, path: pathlib.Path, elsewhere: str) -> str:
    import tqdm  # lazy: only downloads need it

    checksums, received, head = _checksums(), 0, b""
    with atomic_write(path) as temporary, open(temporary, "xb") as stream, opened(address) as response:
        size = response.length  # bytes of Content-Length
        if size is None and not response.chunked:  # chunked: Google's compressed files
            raise TransferError("the server does not say its size", retry=False)
        free = shutil.disk_usage(path.parent).free - _SPARE
        if size is not None and size > free:
            raise _no_space(path, free, elsewhere)
        with tqdm.tqdm(
            total=size, desc=path.name, unit="B", unit_scale=True, unit_divisor=1024, disable=None
        ) as progress:
            while chunk := _read(response):
                received += len(chunk)
                if received > free:
                    raise _no_space(path, free, elsewhere)
                head = head or chunk[:_HEAD]
                stream.write(chunk)
                for checksum in checksums.values():
                    checksum.update(chunk)
                progress.update(len(chunk))
        if size is not None and received != size:
            raise TransferError(f"it ended after {received} of {size} bytes", retry=True)
        found = {name: checksum.digest().hex() for name, checksum in checksums.items()}
        for name, stated in {**_stated_by_google(response), "sha256": _stated_by_hugging_face(response)}.items():
            if stated and name in found and stated != found[name]:
                raise TransferError(f"its {name} is {found[name]}, but the server states {stated}", retry=True)
        if not _begins_as(path.suffix, head):
            raise TransferError(f"it is no {path.suffix} file, but begins with {head[:40]!r}", retry=False)
    return found["sha256"]


def _checksums() -> dict[str, Any]:
    """Those that servers state, each with `update` and `digest`."""
    checksums: dict[str, Any] = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with contextlib.suppress(ImportError):  # comes with the training libraries; the models do without them
        import google_crc32c  # lazy: only downloads and TFRecord files need it

        checksums["crc32c"] = google_crc32c.Checksum()
    return checksums


def _stated_by_google(response: http.client.HTTPResponse) -> dict[str, str]:
    """Checksums of a response of Google Cloud Storage by name, hexadecimal. Composite objects have no MD5."""
    headers = response.headers
    if headers.get("X-Goog-Stored-Content-Encoding", "identity") != "identity":
        return {}  # they are those of the compressed object
    stated = ",".join(headers.get_all("X-Goog-Hash", []))
    found = re.findall(r"\b(md5|crc32c)=([\w+/]{22}==|[\w+/]{6}==)", stated, re.ASCII)
    return {name: base64.b64decode(value).hex() for name, value in found}


def _stated_by_hugging_face(response: http.client.HTTPResponse) -> str | None:
    """The SHA-256 of a large file of Hugging Face, hexadecimal. Its ETag of a small file is a Git hash."""
    headers = response.headers
    tag = headers.get("X-Linked-Etag") or (headers.get("ETag") if "X-Repo-Commit" in headers else None)
    found = re.fullmatch(r'"?([0-9a-f]{64})"?', tag or "")
    return found and found[1]


def _begins_as(suffix: str, head: bytes) -> bool:
    """Whether a file with this suffix can begin so; some servers return an HTML page instead of an error."""
    if suffix == ".npz":
        return head.startswith((b"PK\x03\x04", b"PK\x05\x06"))  # archive, empty archive
    if suffix == ".safetensors":
        return head[8:9] == b"{"
    return not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<")


def _no_space(path: pathlib.Path, free: int, elsewhere: str) -> UserError:
    return UserError(
        f"{path.name} is larger than the {max(free, 0)} bytes of free space on the disk of {path.parent}; free some "
        f"space or {elsewhere}."
    )


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    linked_etag: str | None = None
    """Hugging Face states the hash in the answer that redirects to the storage."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        stays_local = is_local(req.full_url) and is_local(newurl)
        if urllib.parse.urlsplit(newurl).scheme != "https" and not stays_local:
            fp.close()
            raise TransferError(f"it redirects to {newurl[:200]!r}, which is not https", retry=False)
        self.linked_etag = headers.get("X-Linked-Etag", self.linked_etag)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def opened(address: str) -> Iterator[http.client.HTTPResponse]:
    redirects = _SafeRedirects()
    try:
        response = urllib.request.build_opener(redirects).open(address, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        retry = error.code in (408, 429) or error.code >= 500
        raise TransferError(f"{error.code} {error.reason}", retry=retry) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransferError(_reason(error), retry=not isinstance(error, ValueError)) from error
    if redirects.linked_etag:
        response.headers["X-Linked-Etag"] = redirects.linked_etag
    with response:
        yield response


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(_reason(error), retry=True) from error


def _reason(error: Exception) -> str:
    """The message of a network error, on one line."""
    return " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__


def sha256_of(path: pathlib.Path) -> str:
    """The SHA-256 of a file, hexadecimal."""
    with open(path, "rb") as stream:
        sha256 = hashlib.sha256()
        while chunk := stream.read(_CHUNK):
            sha256.update(chunk)
    return sha256.hexdigest()
