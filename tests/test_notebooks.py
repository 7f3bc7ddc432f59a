"""The notebooks: linked from the documentation, and executed from beginning to end; one is stored with its outputs."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EXECUTED = FOLDER / "worked-example.ipynb"


def code_of(path: pathlib.Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path != EXECUTED], ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    assert code_of(path)
    assert not [cell for cell in code_of(path) if cell["outputs"] or cell["execution_count"] is not None]


def test_the_worked_example_is_stored_as_it_was_executed_once():
    install, *code = code_of(EXECUTED)
    assert [cell["execution_count"] for cell in (install, *code)] == list(range(1, len(code) + 2))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(cell["outputs"] for cell in code)
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert "/tmp" not in json.dumps([output.get("text", "") for output in outputs])


def test_every_notebook_is_linked_from_the_documentation():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert NOTEBOOKS
    assert not [path.name for path in NOTEBOOKS if f"(notebooks/{path.name})" not in page]


_EXECUTE = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=300).execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_an_empty_folder(path, tmp_path):
    hint = f"not installed: pip install -r {(FOLDER / 'requirements.txt').relative_to(ROOT)}"
    nbformat = pytest.importorskip("nbformat", reason=hint)
    pytest.importorskip("ipykernel", reason=hint)
    pytest.importorskip("nbclient", reason=hint)
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    for number in range(24):  # in place of the photos that are downloaded
        photo = np.full((32, 32, 3), 10 * number, np.uint8)
        place = tmp_path / ("new" if number > 21 else "photos") / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(photo).save(place)
    # A small checkpoint in place of the published ones, which are downloaded.
    checkpoint = str(ROOT / "tests" / "fixtures" / "hf_vit")
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONSAFEPATH": "1", "CHECKPOINT": checkpoint}
    command = [sys.executable, "-c", _EXECUTE, str(path), str(tmp_path / "executed.ipynb")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    notebook = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)  # the last figures are there
