"""Names of the Hugging Face hub, against a server on this machine that answers as the hub does."""

import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from keras_vit import UserError
from keras_vit.checkpoints.find import HubName, parse_hub_name
from tests.support import running

ROOT = pathlib.Path(__file__).parent.parent.parent
COMMIT, OTHER_COMMIT = "0123456789" * 4, "abcdef0123" * 4
VIT = {"config.json": b'{"model_type": "vit"}', "model.safetensors": b"weights", "pytorch_model.bin": b"a pickle"}
SHARDS = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
REPOSITORIES = {
    "google/vit": VIT | {"preprocessor_config.json": b"{}"},
    "timm/vit_tiny.augreg": VIT,
    "openai/clip": VIT | {"processor_config.json": b"{}"},
    "facebook/sharded": {
        "config.json": b"{}",
        "model.safetensors.index.json": json.dumps(SHARDS).encode(),
        **{name: name.encode() for name in SHARDS["weight_map"].values()},
    },
    "old/pickle": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
}
# Runs without Keras; prints the files of each folder, or the sentence.
SCRIPT = """
import sys
from keras_vit import UserError, find_checkpoint
for name in sys.argv[1:]:
    try:
        folder = find_checkpoint(name)
        print(*sorted(f"{path.name}={path.read_text()}" for path in folder.iterdir()), sep="\\n")
    except UserError as error:
        print("UserError:", error)
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").removeprefix("api/models/").split("/")
        parts += ["revision", "main"] if len(parts) == 2 else []
        is_api, (owner, name, verb, revision, *path) = self.path.startswith("/api/"), parts
        repository, file = f"{owner}/{name}", "/".join(path)
        self.server.requests.append((self.command, repository, file, self.headers.get("Authorization")))
        is_gated = repository == "closed/gated" and not is_api  # everybody may see the names of its files
        if is_gated and self.headers.get("Authorization") != "Bearer hf_accepted":
            return self._answer(403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted.")
        files = REPOSITORIES.get(repository, VIT if repository == "closed/gated" else None)
        if files is None:
            return self._answer(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        if revision not in ("main", "v1", COMMIT, OTHER_COMMIT):
            return self._answer(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        commit = OTHER_COMMIT if revision in ("v1", OTHER_COMMIT) else COMMIT
        if is_api:
            listed = [
                {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for file, content in files.items()
            ]
            answer = listed if verb == "tree" else {"id": repository, "sha": commit}
            return self._answer(200, json.dumps(answer).encode(), Content_Type="application/json")
        if file not in files:
            return self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        tag = hashlib.sha256(files[file]).hexdigest()
        return self._answer(200, files[file], X_Repo_Commit=commit, ETag=f'"{tag}"')

    def _answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture(name="hub", scope="module")
def _hub():
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)) as server:
        server.daemon_threads, server.requests = True, []
        yield server


def fetch(names: str, home: pathlib.Path, hub=None, **variables: str) -> str:
    """Return what a process prints that finds checkpoints: the files in their folders, or the sentences."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    port = hub.server_port if hub else 9  # where nothing listens
    own |= {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_DISABLE_XET": "1"}
    own["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    command = [sys.executable, "-c", SCRIPT, *names.split()]
    done = subprocess.run(command, cwd=ROOT, env=own | variables, capture_output=True, text=True, check=True)
    assert "Retrying" not in done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("name", "repository", "revision"),
    [
        ("hf:google/vit-base-patch16-224-in21k", "google/vit-base-patch16-224-in21k", None),
        ("hf:google/vit@v1.0", "google/vit", "v1.0"),
        ("timm/vit_base_patch16_224.augreg_in21k", "timm/vit_base_patch16_224.augreg_in21k", None),
        ("https://huggingface.co/google/vit/resolve/main/model.safetensors", "google/vit", "main"),
    ],
)
def test_a_name_is_a_repository_and_a_revision(name, repository, revision):
    assert parse_hub_name(name) == HubName(repository, revision)


@pytest.mark.parametrize(
    "name", ["imagenet21k/ViT-B_16", "augreg:B_16", "a/b", "https://example.org/model.safetensors"]
)
def test_other_names_are_not_of_the_hub(name):
    assert parse_hub_name(name) is None


@pytest.mark.parametrize("name", ["hf:vit", "hf:", "hf:google/vit/model.safetensors", "hf:google/vit@"])
def test_a_name_without_owner_is_one_sentence(name):
    with pytest.raises(UserError, match="must be hf:owner/name or hf:owner/name@revision"):
        parse_hub_name(name)


def test_only_weights_and_configs_are_downloaded_once_and_then_found_offline(hub, tmp_path):
    hub.requests.clear()
    files = 'config.json={"model_type": "vit"}\nmodel.safetensors=weights\npreprocessor_config.json={}\n'
    assert fetch("hf://google/vit", tmp_path, hub) == files
    assert not any(file.endswith(".bin") for _, _, file, _ in hub.requests)
    hub.requests.clear()
    assert fetch("hf:google/vit", tmp_path, hub) == files
    assert not any(file for method, _, file, _ in hub.requests if method == "GET")
    hub.requests.clear()
    assert fetch("hf:google/vit", tmp_path, hub, HF_HUB_OFFLINE="1") == files
    assert hub.requests == []


def test_a_repository_without_a_processor_is_complete_offline_too_and_shards_are_found_by_their_index(hub, tmp_path):
    names = "timm/vit_tiny.augreg hf:facebook/sharded"
    files = fetch(names, tmp_path, hub)
    assert fetch(names, tmp_path, hub, HF_HUB_OFFLINE="1") == files
    own, *others = files.splitlines()[1:]
    assert (files.splitlines()[0], own) == ('config.json={"model_type": "vit"}', "model.safetensors=weights")
    assert [file.partition("=")[0] for file in others] == [
        "config.json", *SHARDS["weight_map"].values(), "model.safetensors.index.json"
    ]  # fmt: skip


def test_a_revision_is_followed_and_a_token_opens_a_gated_repository(hub, tmp_path):
    fetch("hf:google/vit@v1", tmp_path, hub)
    assert [path.name for path in tmp_path.glob("hub/models--google--vit/snapshots/*")] == [OTHER_COMMIT]
    assert "model.safetensors=weights" in fetch("hf:closed/gated", tmp_path, hub, HF_TOKEN="hf_accepted")


def test_what_the_hub_refuses_is_one_sentence(hub, tmp_path):
    sentences = {
        "hf:closed/gated": "closed/gated is gated: accept its terms at http",
        "hf:google/none": "The Hugging Face hub has no repository 'google/none' that you may read",
        "hf:google/vit@v2": "google/vit has no branch, tag or commit 'v2'; leave out @",
        "hf:google/a--b": "'google/a--b' cannot be the name of a repository",
        "hf:old/pickle": "old/pickle on the Hugging Face hub has no model.safetensors, and pickles",
    }
    printed = fetch(" ".join(sentences), tmp_path, hub).splitlines()
    for line, sentence in zip(printed, sentences.values(), strict=True):
        assert line.startswith("UserError: ")
        assert sentence in line


def test_offline_and_without_the_files_the_sentence_says_so(tmp_path):
    printed = fetch("hf:google/vit", tmp_path, HF_HUB_OFFLINE="1")
    assert printed.startswith(
        "UserError: google/vit is not complete in the cache of huggingface_hub, and HF_HUB_OFFLINE"
    )
    assert len(printed.splitlines()) == 1


def test_without_a_network_the_cache_is_used_and_else_the_sentence_names_the_hub_within_seconds(hub, tmp_path):
    names = "hf:google/vit timm/vit_tiny.augreg"
    files = fetch(names, tmp_path, hub)
    begin = time.monotonic()
    printed = fetch(f"{names} hf:google/none", tmp_path)
    assert time.monotonic() - begin < 10.0  # of huggingface_hub alone more than 20
    assert printed.startswith(files)
    (sentence,) = printed.removeprefix(files).splitlines()
    assert "and http://127.0.0.1:9 cannot be reached" in sentence
