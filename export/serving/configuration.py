"""The files for serving a model with TF Serving: server configuration, compose file, and client."""

import pathlib
import re
import shutil
from collections.abc import Mapping

from export.options import KitOptions
from keras_vit import UserError
from keras_vit.errors import refuse_first
from keras_vit.files.atomic import staged
from keras_vit.files.remote import existing_folder, local_path, output_folder

# Image of the server; its version must not be older than the TensorFlow that wrote the models.
_IMAGE = "tensorflow/serving:${TF_SERVING_VERSION:-latest}"
_POLL_SECONDS = 60
_CLIENT = pathlib.Path(__file__).parent / "client.py"


def write_kit(options: KitOptions) -> pathlib.Path:
    """Write the folder and return its path.

    Raises UserError for missing versions and for an invalid name.
    """
    name, canary = options.name, options.canary
    served, kit = local_path(options.models, "models"), output_folder(options.output)
    versions = _versions(served)
    labels = {"stable": versions[-1] if options.stable is None else options.stable}
    if canary is not None:
        labels["canary"] = canary
    known = ", ".join(map(str, versions))
    refuse_first(
        [
            (
                not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not name.strip("."),
                f"--name takes letters, digits, '_', '.' and '-', but is {name!r}.",
            ),
            (kit.exists() and any(kit.iterdir()), f"{kit} is not empty; pass a new --output."),
            *(
                (version not in versions, f"--{label} is {version}, but {served} has {known}; pass one of them.")
                for label, version in labels.items()
            ),
        ]
    )
    with staged(kit) as stage:
        texts = {
            "models.config": models_config(name, labels),
            "batching.config": batching_config(
                options.max_batch_size, round(1000 * options.batch_timeout_ms), options.threads
            ),
            "compose.yaml": compose_file(name, served.resolve()),
            "README.md": _readme(name, labels),
        }
        for file, text in texts.items():
            (stage / file).write_text(text, encoding="utf-8")
        shutil.copy(_CLIENT, stage)
    return kit


def _versions(models: pathlib.Path) -> list[int]:
    existing_folder(models, "pass the --output of `keras-vit saved-model`")
    found = sorted(int(path.parent.name) for path in models.glob("*/saved_model.pb") if path.parent.name.isdecimal())
    if not found:
        raise UserError(f"{models} has no version of a model, such as {models / '1'}; export one there first.")
    return found


def models_config(name: str, labels: Mapping[str, int]) -> str:
    """tensorflow.serving.ModelServerConfig as text: the versions with a label, and the labels."""
    specific = "".join(f"        versions: {version}\n" for version in sorted(set(labels.values())))
    named = "".join(
        f'    version_labels {{\n      key: "{label}"\n      value: {version}\n    }}\n'
        for label, version in labels.items()
    )
    return (
        "model_config_list {\n  config {\n"
        f'    name: "{name}"\n    base_path: "/models/{name}"\n    model_platform: "tensorflow"\n'
        f"    model_version_policy {{\n      specific {{\n{specific}      }}\n    }}\n{named}"
        "  }\n}\n"
    )


def batching_config(max_batch_size: int, timeout_micros: int, threads: int) -> str:
    """tensorflow.serving.BatchingParameters as text; the queue holds 16 batches per thread."""
    values = {
        "max_batch_size": max_batch_size,
        "batch_timeout_micros": timeout_micros,
        "max_enqueued_batches": 16 * threads,
        "num_batch_threads": threads,
    }
    return "".join(f"{name} {{ value: {value} }}\n" for name, value in values.items())


def compose_file(name: str, models: pathlib.Path) -> str:
    """A compose file for one server, REST on 8501 and gRPC on 8500."""
    return f"""\
services:
  "{name.lower()}":
    image: {_IMAGE}
    command:
      - --model_config_file=/config/models.config
      - --model_config_file_poll_wait_seconds={_POLL_SECONDS}
      - --allow_version_labels_for_unavailable_models=true
      - --enable_batching=true
      - --batching_parameters_file=/config/batching.config
    ports:
      - "8500:8500"
      - "8501:8501"
    volumes:
      - type: bind
        source: {_yaml_text(str(models))}
        target: "/models/{name}"
        read_only: true
      - type: bind
        source: .
        target: /config
        read_only: true
    restart: unless-stopped
"""


def _yaml_text(text: str) -> str:
    """Quote a string for the YAML of a compose file. Raises UserError if it is not printable."""
    if not text.isprintable():
        raise UserError(f"{text!r} has characters that a compose file cannot hold; move the models to another path.")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


def _readme(name: str, labels: Mapping[str, int]) -> str:
    served = ", ".join(f"{label} = version {version}" for label, version in labels.items())
    return f"""\
# Serving {name}

```text
docker compose up
```

serves {served}, by REST on port 8501 and by gRPC on port 8500. To serve another version, copy it to the directory of
versions, list it in models.config under `specific` and add a label. The server reads the file every {_POLL_SECONDS}
seconds.

```text
from client import RestClient

client = RestClient("http://localhost:8501", "{name}", version="stable")
[ranking] = client.classify([open("picture.jpg", "rb").read()])
print(ranking[0].label, ranking[0].score)
```

The client needs only Python's standard library.

The server batches requests (batching.config). An image that cannot be decoded fails the batch, including the requests
of other users in it. If images come from untrusted users, decode them first, or remove `--enable_batching` from
compose.yaml.
"""
