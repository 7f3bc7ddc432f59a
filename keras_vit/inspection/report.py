"""Figures, arrays and page of a model in a directory."""

import json
import os
import pathlib

from keras_vit import run_directory
from keras_vit.inspection.observe import Findings
from keras_vit.inspection.page import page
from keras_vit.inspection.pictures import draw_all, save
from keras_vit.npz import write_npz

_MEASURES = "measures.json"


def write(findings: Findings, output: str | os.PathLike) -> list[str]:
    """Write every figure as PNG, arrays.npz, measures.json and index.html into a directory; give the files' names.

    All of it is put in place at the end; of an earlier report there, what is not replaced is removed.
    """
    earlier = _files_of(pathlib.Path(output) / _MEASURES)
    with run_directory.staged(run_directory.check_output(output)) as stage:
        for name, figure in draw_all(findings):
            save(figure, stage / name)
        write_npz(stage / "arrays.npz", findings.arrays)
        (stage / "index.html").write_text(page(findings), encoding="utf-8")
        names = sorted([*(path.name for path in pathlib.Path(stage).iterdir()), _MEASURES])
        told = json.dumps({**findings.measures, "files": names}, indent=2)
        (stage / _MEASURES).write_text(told + "\n", encoding="utf-8")
    for name in set(earlier) - set(names):
        (pathlib.Path(output) / name).unlink(missing_ok=True)
    return names


def _files_of(measures: pathlib.Path) -> list[str]:
    """What an earlier report wrote beside its measures; nothing where there was none that can be read."""
    try:
        names = json.loads(measures.read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(names, list):
        return []
    return [name for name in names if isinstance(name, str) and pathlib.PurePath(name).name == name]
