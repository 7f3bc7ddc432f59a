"""Write the plots, arrays and HTML report of an inspection to a directory."""

import json
import os
import pathlib

from keras_vit import run_directory
from keras_vit.files.atomic import staged
from keras_vit.files.npz import write_npz
from keras_vit.inspection.compute import InspectionResult
from keras_vit.inspection.html_report import html_report
from keras_vit.inspection.plots import draw_all, write_png

_MEASURES = "measures.json"


def write(result: InspectionResult, output: str | os.PathLike) -> list[str]:
    """Write each figure as PNG, arrays.npz, measures.json and index.html. Return the file names.

    Files are moved to the directory after all are written. Figures of an earlier report that are not overwritten are
    removed.
    """
    folder = run_directory.output_folder(output)
    earlier = _figures_of(folder)
    with staged(folder) as stage:
        for name, figure in draw_all(result):
            write_png(figure, stage / name)
        write_npz(stage / "arrays.npz", result.arrays)
        (stage / "index.html").write_text(html_report(result), encoding="utf-8")
        names = sorted([*(path.name for path in pathlib.Path(stage).iterdir()), _MEASURES])
        measures = json.dumps({**result.measures, "files": names}, indent=2)
        (stage / _MEASURES).write_text(measures + "\n", encoding="utf-8")
    for path in earlier:
        if path.name not in names:
            path.unlink(missing_ok=True)
    return names


def _figures_of(output: pathlib.Path) -> list[pathlib.Path]:
    """The figures of an earlier report in a directory, as its measures.json lists them; empty if it cannot be read.

    The list is not trusted: only PNG files directly in the directory match. Other files of a report are overwritten.
    """
    try:
        listed = json.loads((output / _MEASURES).read_text(encoding="utf-8"))["files"]
        found = [path for path in output.glob("*.png") if path.name in listed and path.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return found if isinstance(listed, list) else []
