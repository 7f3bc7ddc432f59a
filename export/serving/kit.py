"""Writes a folder for serving a model with TF Serving: server configuration, compose file, and client.

    keras-vit serving --models served --name digits --output kit

The compose file mounts the directory of all versions. To serve a version that is added later, list it in models.config;
the server reads the file every minute. Clients that use a label ("stable") switch to another version when the label
moves in this file.
"""

import json
import pathlib
import re
import shlex
import shutil
from collections.abc import Sequence

from export.options import KitOptions
from export.texts import render
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.errors import refuse_first
from keras_vit.files.atomic import staged
from keras_vit.files.remote import existing_folder, local_path, output_folder


def main(arguments: Sequence[str]) -> None:
    """`--models DIR --name NAME --output DIR`"""
    options = parser.parse(KitOptions, arguments, prog="keras-vit serving", about=__doc__)
    output = write_kit(options)
    print(f"Start the server with Docker: cd {shlex.quote(str(output))} && docker compose up")


def write_kit(options: KitOptions) -> pathlib.Path:
    """Write the folder and return its path. Raises UserError for missing versions and for an invalid name."""
    name, served, kit = options.name, local_path(options.models, "models"), output_folder(options.output)
    existing_folder(served, "pass the --output of `keras-vit saved-model`")
    versions = sorted(int(path.parent.name) for path in served.glob("*/saved_model.pb") if path.parent.name.isdecimal())
    labels = {"stable": max(versions, default=0) if options.stable is None else options.stable}
    if options.canary is not None:
        labels["canary"] = options.canary
    known = ", ".join(map(str, versions))
    is_name = re.fullmatch(r"[A-Za-z0-9_.-]+", name) and name.strip(".")
    rules = [
        (not versions, f"{served} has no version of a model, such as {served / '1'}; export one there first."),
        (not is_name, f"--name accepts letters, digits, '_', '.' and '-', but is {name!r}."),
        (kit.exists() and any(kit.iterdir()), f"{kit} is not empty; pass a new --output."),
    ]
    for label, version in labels.items():
        wrong = f"--{label} is {version}, but {served} has {known}; pass one of them."
        rules.append((version not in versions, wrong))
    refuse_first(rules)
    values = {"name": name, "labels": labels, "models": _yaml_text(str(served.resolve()))}
    with staged(kit) as stage:
        for template in ("models.config", "batching.config", "compose.yaml", "serving.md"):
            file = "README.md" if template == "serving.md" else template
            (stage / file).write_text(render(template, **values), encoding="utf-8")
        shutil.copy(pathlib.Path(__file__).with_name("client.py"), stage)
    return kit


def _yaml_text(text: str) -> str:
    """Quote a text for the YAML of a compose file: double quotes are those of JSON, and $$ is a $."""
    return json.dumps(text, ensure_ascii=False).replace("$", "$$")


if __name__ == "__main__":
    cli.run(main)
