"""Exports a model as a SavedModel for TF Serving, and verifies it against the Keras model.

    python -m export.saved_model --run runs/demo --output served

Writes the next version, served/<version>/, with the signatures of `signatures.py`, assets/labels.txt, warm-up requests,
a model card (README.md) and the verification report (report.md, report.json, report.png).
"""

from collections.abc import Sequence

from export.options import SavedModelOptions, check_output
from keras_vit import cli, parser


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(SavedModelOptions, arguments, prog="python -m export.saved_model")
    run = options.source.open_run()
    check_output(options.output)
    cli.require_tensorflow()

    from export import parity
    from export.saved_model.export import export_saved_model, summary
    from export.source import open_model

    parity.check_share(options.max_disagreement)
    path, found = export_saved_model(open_model(run, options.source), options)
    print(summary(path, found))


if __name__ == "__main__":
    cli.run(main)
