"""Writes a folder for serving a model with TF Serving: server configuration, compose file, and client.

    keras-vit serving --models served --name digits --output kit

The compose file mounts the directory of all versions. To serve a version that is added later, list it in models.config;
the server reads the file every minute. Clients that use a label ("stable") switch to another version when the label
moves in this file.
"""

from collections.abc import Sequence

from export.options import KitOptions
from export.serving.configuration import write_kit
from keras_vit import cli
from keras_vit.cli import parser


def main(arguments: Sequence[str]) -> None:
    """`--models DIR --name NAME --output DIR`"""
    options = parser.parse(KitOptions, arguments, prog="keras-vit serving", about=__doc__)
    output = write_kit(options)
    print(f"{output} is ready: `docker compose up` there.")


if __name__ == "__main__":
    cli.run(main)
