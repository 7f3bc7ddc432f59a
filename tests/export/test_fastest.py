"""All forms of a model on this machine: which is recommended, and which cannot be measured."""

import dataclasses
import json

import numpy as np
import pytest

from export import parity
from export.fastest import compare
from export.fastest.compare import Measured, compare_forms, recommendation
from export.options import FastestOptions, SourceOptions
from export.source import ExportedModel
from export.tflite.convert import to_tflite
from keras_vit import UserError
from tests.exports import model_of_five

EXACT = parity.Parity(1e-6, 1e-7, 1.0, 0.9, 128)
ROUNDED = parity.Parity(0.02, 0.01, 0.995, 0.9, 128)
OTHER = parity.Parity(0.3, 0.2, 0.98, 0.9, 128)


def measured(name: str, found: parity.Parity, low: float, high: float, memory: int = 10**8) -> Measured:
    return Measured(name, f"forms/{name}", found, (low, (low + high) / 2, high), memory, 2 * memory)


def test_the_fastest_is_recommended_and_of_equals_the_exact_one_with_least_memory():
    forms = [
        measured("tflite-int8-dynamic", ROUNDED, 10, 12),
        measured("tflite", EXACT, 11, 13, 2 * 10**8),
        measured("onnx", EXACT, 12, 13),
        measured("saved-model", EXACT, 30, 40),
    ]
    assert recommendation(forms) == (
        "Take onnx: 12.5 ms for a batch, 100 MB, the outputs of the model; no slower within the spread are "
        "tflite-int8-dynamic, tflite."
    )
    assert recommendation([measured("saved-model-bfloat16", ROUNDED, 5, 6), *forms]) == (
        "Take saved-model-bfloat16: 5.5 ms for a batch, 100 MB, 99.5% of its classes; the fastest with the outputs of "
        "the model is tflite, 12 ms."
    )
    other = measured("saved-model-bfloat16", OTHER, 5, 6)
    assert recommendation([other, forms[-1]]).startswith("Take saved-model: 35 ms")
    assert recommendation([other]).startswith("None of the forms has the classes")


@pytest.fixture(name="exported", scope="module")
def _exported() -> ExportedModel:
    return model_of_five()


def test_the_onnx_file_is_written_once_for_both_of_its_runtimes(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "require_packages", lambda packages: None)
    monkeypatch.setattr(compare, "export_onnx", lambda task, options: (tmp_path / options.output, {}))
    options = FastestOptions(SourceOptions("a model"), str(tmp_path))
    file = compare._write(None, "openvino", options, {})
    assert file == tmp_path / "onnx"
    monkeypatch.setattr(compare, "export_onnx", lambda *_: pytest.fail("it was written again"))
    assert compare._write(None, "onnx", options, {"openvino": file}) == file
    assert compare._write(None, "openvino", options, {"onnx": file}) == file


@pytest.mark.slow
def test_forms_are_measured_in_processes_of_their_own_and_others_named_with_the_reason(exported, tmp_path, monkeypatch):
    file = tmp_path / "model.tflite"
    file.write_bytes(to_tflite(exported.model, dynamic_batch=True))
    (tmp_path / "none.tflite").write_bytes(b"no file of LiteRT")

    def write(_, form, *others):
        if form == "onnx":
            raise UserError("An export as onnx needs onnxruntime, which is not installed.")
        return file if form == "tflite" else tmp_path / "none.tflite"

    monkeypatch.setattr(compare, "_write", write)
    formats = ("tflite", "tflite-int8-dynamic", "onnx")
    options = FastestOptions(SourceOptions("a model"), str(tmp_path), batch_size=3, rounds=2, formats=formats)
    [form], left_out = compare_forms(exported, options)
    assert form.exact
    assert (form.name, form.parity.num_images) == ("tflite", 7)
    assert 0 < form.milliseconds[0] <= form.milliseconds[1] <= form.milliseconds[2]
    assert 10**7 < form.memory <= form.peak_memory
    assert left_out["onnx"].startswith("An export as onnx needs")
    assert left_out["tflite-int8-dynamic"].startswith("The file cannot be run here (")
    facts = json.loads((tmp_path / "report.json").read_text())
    assert facts["forms"]["tflite"]["memory"] == form.memory
    assert facts["recommendation"] == recommendation([form])
    assert "Not measured: onnx. An export as onnx needs" in (tmp_path / "report.md").read_text()
    for logits, words in (
        (np.eye(7, 5) * 99, "The logits of the tflite differ from the model's by up to"),
        (np.zeros((7, 5)), "The tflite returns nearly the same logits for all 7 images"),
    ):
        monkeypatch.setattr(compare.np, "load", lambda file, logits=logits: logits)
        with pytest.raises(UserError, match=words):
            compare_forms(exported, dataclasses.replace(options, formats=("tflite",)))
    with pytest.raises(UserError, match=r"None of the forms can be used here: An export as onnx needs onnxruntime"):
        compare_forms(exported, dataclasses.replace(options, formats=("onnx",)))
