"""Figures, arrays and page of a model in a directory."""

import json
import os
import pathlib

from keras_vit import run_directory
from keras_vit.files.npz import write_npz
from keras_vit.inspection.compute import InspectionResult
from keras_vit.inspection.html_report import page
from keras_vit.inspection.plots import draw_all, save

_MEASURES = "measures.json"


def write(findings: InspectionResult, output: str | os.PathLike) -> list[str]:
    """Write every figure as PNG, arrays.npz, measures.json and index.html into a directory; give the files' names.

    All of it is put in place at the end; of an earlier report there, figures that are not replaced are removed.
    """
    earlier = _figures_of(pathlib.Path(output))
    with run_directory.staged(run_directory.check_output(output)) as stage:
        for name, figure in draw_all(findings):
            save(figure, stage / name)
        write_npz(stage / "arrays.npz", findings.arrays)
        (stage / "index.html").write_text(page(findings), encoding="utf-8")
        names = sorted([*(path.name for path in pathlib.Path(stage).iterdir()), _MEASURES])
        told = json.dumps({**findings.measures, "files": names}, indent=2)
        (stage / _MEASURES).write_text(told + "\n", encoding="utf-8")
    for path in earlier:
        if path.name not in names:
            path.unlink(missing_ok=True)
    return names


def _figures_of(output: pathlib.Path) -> list[pathlib.Path]:
    """The figures of an earlier report in a directory, as its measures list them; none where these cannot be read.

    What the list names may come from anyone. So the directory is what is looked through: nothing outside it, no
    directory in it and no file of another kind can be meant. All other files of a report are written every time.
    """
    try:
        listed = json.loads((output / _MEASURES).read_text(encoding="utf-8"))["files"]
        found = [path for path in output.glob("*.png") if path.name in listed and path.is_file()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return found if isinstance(listed, list) else []
