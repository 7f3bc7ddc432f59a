"""A folder with all that serves a model by TF Serving: the server's configuration, a compose file, a client.

    python -m export.serving.kit --models served --name digits --output kit

The folder above the versions is mounted, so a version that is added later is found by the server once models.config
names it; the server reads the file again every minute. Clients that ask for a label ("stable") move from version to
version by a change of that file alone, and back.
"""

import dataclasses
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence

from keras_vit import UserError, cli, run_directory
from keras_vit.files.atomic import staged

# Version of the server: that of the TensorFlow which wrote the models, or a later one.
_IMAGE = "tensorflow/serving:${TF_SERVING_VERSION:-latest}"
_POLL_SECONDS = 60
_CLIENT = pathlib.Path(__file__).parent / "client"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write what serves the versions of a model by TF Serving."""

    models: str
    """Directory of the model's versions, the --output of `python -m export.saved_model`."""
    name: str
    """Name of the model in requests."""
    output: str
    """New directory for models.config, batching.config, compose.yaml, README.md and client/."""
    stable: int | None = None
    """Version with the label "stable"; default: the newest."""
    canary: int | None = None
    """Version with the label "canary"; default: none."""
    max_batch_size: int = 32
    """Images that the server computes together, of however many requests."""
    batch_timeout_ms: float = 2.0
    """Milliseconds that a request waits for others."""
    threads: int = 2
    """Batches that are computed at once, one per core of the server or so."""


def write_kit(arguments: Arguments) -> pathlib.Path:
    """Write the folder and return its path. Raises UserError for versions that are not there and for a wrong name."""
    models, output = pathlib.Path(arguments.models), run_directory.check_output(arguments.output)
    versions = _versions(models)
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", arguments.name) or not arguments.name.strip("."):
        raise UserError(f"--name takes letters, digits, '_', '.' and '-', but is {arguments.name!r}.")
    if output.exists() and any(output.iterdir()):
        raise UserError(f"{output} is not empty; give a new --output.")
    if arguments.max_batch_size < 1 or arguments.threads < 1 or not 0 <= arguments.batch_timeout_ms < 10_000:
        raise UserError("--max-batch-size and --threads must be at least 1, --batch-timeout-ms from 0 to 10000.")
    labels = {"stable": versions[-1] if arguments.stable is None else arguments.stable}
    if arguments.canary is not None:
        labels["canary"] = arguments.canary
    for label, version in labels.items():
        if version not in versions:
            raise UserError(
                f"--{label} is {version}, but {models} has the versions {', '.join(map(str, versions))}; give one of "
                "them."
            )
    with staged(output) as stage:
        texts = {
            "models.config": models_config(arguments.name, labels),
            "batching.config": batching_config(
                arguments.max_batch_size, round(1000 * arguments.batch_timeout_ms), arguments.threads
            ),
            "compose.yaml": compose_file(arguments.name, models.resolve()),
            "README.md": _readme(arguments.name, labels),
        }
        for name, text in texts.items():
            (stage / name).write_text(text, encoding="utf-8")
        shutil.copytree(_CLIENT, stage / "client", ignore=shutil.ignore_patterns("__pycache__"))
    return output


def _versions(models: pathlib.Path) -> list[int]:
    if not models.is_dir():
        raise UserError(f"There is no directory {str(models)!r}; give the --output of `python -m export.saved_model`.")
    found = sorted(int(path.parent.name) for path in models.glob("*/saved_model.pb") if path.parent.name.isdecimal())
    if not found:
        raise UserError(f"{models} has no version of a model, such as {models / '1'}; export one there first.")
    return found


def models_config(name: str, labels: Mapping[str, int]) -> str:
    """tensorflow.serving.ModelServerConfig as text: the versions that have a label, and which has which."""
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
    """tensorflow.serving.BatchingParameters as text; the queue holds a second's worth of full batches per thread."""
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
    """A text in double quotes for the YAML of a compose file, where "$" begins a variable. UserError for no text."""
    if not text.isprintable():
        raise UserError(f"{text!r} has characters that a compose file cannot hold; give the models another path.")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{escaped}"'


def _readme(name: str, labels: Mapping[str, int]) -> str:
    served = ", ".join(f"{label} = version {version}" for label, version in labels.items())
    return f"""\
# Serving {name}

```text
docker compose up
```

serves {served}, by REST on port 8501 and by gRPC on port 8500. Another version: put it beside the others, name it in
models.config under `specific` and give it a label; the server reads the file again every {_POLL_SECONDS} seconds.

```text
from client import RestClient, Version

with RestClient("http://localhost:8501", "{name}", version=Version(label="stable")) as client:
    [ranking] = client.classify([open("picture.jpg", "rb").read()])
print(ranking[0].label, ranking[0].score)
```

The client needs NumPy and protobuf, and grpcio for `GrpcClient`; not TensorFlow.

Requests are computed together (batching.config). An image that cannot be decoded is an error of the whole batch, thus
also of requests of others that were waiting with it. Where images come from strangers, decode them before, or leave
`--enable_batching` out of compose.yaml.
"""


def main(arguments: Sequence[str]) -> None:
    """`--models DIR --name NAME --output DIR`"""
    output = write_kit(cli.parse(Arguments, arguments, prog="python -m export.serving.kit"))
    print(f"{output} is ready: `docker compose up` there.")


if __name__ == "__main__":
    cli.run(main)
