"""A model as a SavedModel for TF Serving: OUTPUT/<version>/, checked against the Keras model before it is there.

    python -m export.saved_model --run runs/demo --output served

The signatures are those of `signatures.py`. Beside them: assets/labels.txt, the requests that warm a server up, a model
card (README.md) and the verification report (report.md, report.json, report.png).
"""

from collections.abc import Sequence

from export.options import SavedModelOptions
from keras_vit import cli


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    parsed = cli.parse(SavedModelOptions, arguments, prog="python -m export.saved_model")
    cli.require_tensorflow()

    from export.saved_model.export import export_command

    export_command(parsed)


if __name__ == "__main__":
    cli.run(main)
