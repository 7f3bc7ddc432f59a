"""The exports of the demo, compared with its model, and summary.json."""

import json
from typing import Any

from export.files import directory_bytes
from export.options import SavedModelOptions, SourceOptions, TFLiteOptions
from export.parity import as_table
from export.run import open_run
from export.saved_model.export import export_saved_model
from export.tasks import open_task
from export.tflite.export import export_tflite
from keras_vit.files.atomic import write_text
from keras_vit.files.keras_model import MODEL
from keras_vit.run import Run


def export_and_summarize(run: Run, accuracy: float) -> None:
    """Export and verify a run; write summary.json, whose paths are relative to it. accuracy: on the test images."""
    source = SourceOptions(run=str(run.path), verify_images=360)  # all test images
    task = open_task(open_run(source), source)
    exports = {"SavedModel": export_saved_model(task, SavedModelOptions(source, str(run.path / "saved_model")))}
    files = export_tflite(task, TFLiteOptions(source, str(run.path / "tflite")))
    exports |= {f"TFLite {name}": exported for name, exported in files.items()}
    summary: dict[str, Any] = {
        "parameters": task.exported.model.count_params(),
        "test_accuracy": accuracy,
        "train_seconds": round(sum(epoch["seconds"] for epoch in run.metrics()), 1),
        "tflite": {},
    }
    rows = [("Keras model", MODEL, f"{(run.path / MODEL).stat().st_size / 1e6:,.2f}", "", f"{accuracy:.1%}")]
    for name, (path, measured) in exports.items():
        place, difference = str(path.relative_to(run.path)), measured["max_abs_diff"]
        size = directory_bytes(path) if path.is_dir() else path.stat().st_size
        entry = {"path": place, "bytes": size, "max_abs_diff": difference}
        rows.append((name, place, f"{size / 1e6:,.2f}", f"{difference:.2g}", f"{measured['accuracy']:.1%}"))
        if name == "SavedModel":
            summary["saved_model"] = entry
        else:
            summary["tflite"][name.removeprefix("TFLite ")] = entry | {"accuracy": measured["accuracy"]}
    write_text(run.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    header = ("artifact", "path", "MB", "max |logit diff|", "accuracy")
    print(as_table(rows, header), f"\nAll files are in {run.path}.", sep="\n")
