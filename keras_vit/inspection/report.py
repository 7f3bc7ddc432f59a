"""Figures, arrays and page of a model in a directory."""

import json
import os
import pathlib

from keras_vit import run_directory
from keras_vit.inspection.observe import Findings
from keras_vit.inspection.page import page
from keras_vit.inspection.pictures import draw_all, save
from keras_vit.npz import write_npz


def write(findings: Findings, output: str | os.PathLike) -> list[str]:
    """Write every figure as PNG, arrays.npz, measures.json and index.html into a directory; give the files' names.

    All of it is put in place at the end; files of an earlier report with the same names are replaced.
    """
    with run_directory.staged(run_directory.check_output(output)) as stage:
        for name, figure in draw_all(findings):
            save(figure, stage / name)
        write_npz(stage / "arrays.npz", findings.arrays)
        (stage / "measures.json").write_text(json.dumps(findings.measures, indent=2) + "\n", encoding="utf-8")
        (stage / "index.html").write_text(page(findings), encoding="utf-8")
        return sorted(path.name for path in pathlib.Path(stage).iterdir())
