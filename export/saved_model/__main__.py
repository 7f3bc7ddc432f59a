"""Exports a model as a SavedModel for TF Serving, and verifies it against the Keras model.

    python -m export.saved_model --run runs/demo --output served

Writes the next version, served/<version>/, with the signatures of `signatures.py`, assets/labels.txt, warm-up requests,
a model card (README.md) and the verification report (report.md, report.json, report.png).
"""

from collections.abc import Sequence

from export.options import SavedModelOptions, check_source
from keras_vit import cli, parser
from keras_vit.files.remote import to_path


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(SavedModelOptions, arguments, prog="python -m export.saved_model")
    check_source(options.source, options.output)
    cli.require_tensorflow()

    from export import parity
    from export.saved_model.export import export_saved_model, summary
    from export.source import open_source

    parity.check_share(options.max_disagreement)
    source = open_source(**vars(options.source))
    path, found = export_saved_model(
        source.model,
        source.labels,
        source.samples,
        to_path(options.output),
        origin=source.origin,
        dtype=options.dtype,
        attention=options.attention,
        xla=options.xla,
        merge_tokens=options.merge_tokens or 0,
        threshold=options.threshold,
        max_disagreement=options.max_disagreement,
    )
    print(summary(path, found))


if __name__ == "__main__":
    cli.run(main)
