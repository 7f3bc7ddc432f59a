"""Exports a model as a SavedModel for TF Serving, and verifies it against the Keras model.

    keras-vit saved-model --run runs/demo --output served

Writes the next version, served/<version>/, with the signatures of `signatures.py`, assets/labels.txt, warm-up requests,
a model card (README.md) and the verification report (report.md, report.json, report.png). With --embeddings, also of a
model without a head, it has the signatures of `embeddings.py` instead.
"""

from collections.abc import Sequence

from export.options import SavedModelOptions, check_output
from keras_vit import cli, parser
from keras_vit.files.remote import to_path


def main(arguments: Sequence[str]) -> None:
    """`--run DIR --output DIR`"""
    options = parser.parse(SavedModelOptions, arguments, prog="keras-vit saved-model")
    run = options.source.open_run()
    check_output(options.output)
    cli.require_tensorflow()

    if options.embeddings is not None:
        from export.saved_model.embeddings import export_embeddings
        from export.source import open_without_classes

        exported, normalize = open_without_classes(run, options.source), options.embeddings == "unit-length"
        path, found = export_embeddings(
            exported.model, exported.samples, to_path(options.output), origin=exported.origin, normalize=normalize
        )
        print(f"{path}: embeddings within {found.max_abs_diff:.2g} of the Keras model; see {path / 'report.md'}.")
        cli.print_next([options.kit_command()])
        return

    from export import parity
    from export.detection import is_detector, open_detector
    from export.saved_model.detection import export_detector
    from export.saved_model.export import export_saved_model, summary
    from export.saved_model.segmentation import export_segmenter
    from export.segmentation import is_segmenter, open_segmenter
    from export.source import open_model

    if is_detector(run):
        path, difference = export_detector(open_detector(run, options.source), to_path(options.output))
        print(f"{path}: boxes and logits within {difference:.2g} of the Keras model; see {path / 'report.md'}.")
        return
    if is_segmenter(run):
        path, share = export_segmenter(open_segmenter(run, options.source), to_path(options.output))
        print(f"{path}: {share:.2%} of the pixels are those of the Keras model; see {path / 'report.md'}.")
        return
    parity.check_share(options.max_disagreement)
    path, found = export_saved_model(open_model(run, options.source), options)
    print(summary(path, found))
    evaluation = [("evaluate", "--run", str(path), *run.data_options)] if run.data_options else []
    cli.print_next([options.kit_command(), *evaluation])


if __name__ == "__main__":
    cli.run(main)
