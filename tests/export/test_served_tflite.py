"""The file that TF Serving runs in place of the graph of a SavedModel, as far as LiteRT alone can tell."""

import dataclasses
import pathlib

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from scipy import special

from export import parity
from export.options import SavedModelOptions, SourceOptions
from export.source import ExportedModel, Provenance
from export.tflite import convert
from export.tflite.convert import write_served_file
from keras_vit import UserError
from keras_vit.errors import ParityError
from tests.exports import model_of_five


@pytest.fixture(name="exported", scope="module")
def _exported() -> ExportedModel:
    """A calibrated model of five classes with seven images."""
    return model_of_five(Provenance(temperature=2.0))


@pytest.fixture(name="expected", scope="module")
def _expected(exported) -> parity.Reference:
    return parity.reference(exported.model, exported.preprocessing, exported.samples)


@pytest.fixture(name="file", scope="module")
def _file(exported, expected, tmp_path_factory) -> pathlib.Path:
    """The file that is written of it."""
    folder = tmp_path_factory.mktemp("served")
    facts = write_served_file(folder, exported, expected)
    assert facts["tflite_bytes"] == (folder / "model.tflite").stat().st_size
    return folder / "model.tflite"


def test_inputs_and_outputs_have_the_names_by_which_tf_serving_finds_them(file, expected):
    interpreter = Interpreter(model_path=str(file))
    [image] = interpreter.get_input_details()
    assert image["name"] == "image"  # TF Serving looks for the part before a colon
    interpreter.resize_tensor_input(image["index"], (3, 12, 18, 3))
    interpreter.allocate_tensors()
    interpreter.set_tensor(image["index"], next(expected.batches())[1][:3])
    interpreter.invoke()
    found = {end["name"]: interpreter.get_tensor(end["index"]) for end in interpreter.get_output_details()}
    assert found.keys() == {"logits", "probabilities"}
    np.testing.assert_allclose(found["logits"], expected.logits[:3], atol=1e-5)
    np.testing.assert_allclose(found["probabilities"], special.softmax(expected.logits[:3] / 2.0, axis=-1), atol=1e-5)


def test_a_file_with_other_logits_or_probabilities_is_refused(file, exported, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "to_tflite", lambda *_, **__: file.read_bytes())
    other = dataclasses.replace(expected, outputs=[{"logits": row + 0.01} for row in expected.logits])
    with pytest.raises(ParityError, match=r"logits of the file model.tflite differ from the model's by .*0.01"):
        write_served_file(tmp_path, exported, other)
    several = dataclasses.replace(exported, origin=Provenance(multi_label=True))
    with pytest.raises(ParityError, match="probabilities of model.tflite differ"):
        write_served_file(tmp_path, several, expected)


@pytest.mark.parametrize("option", ["attention", "tflite"])
def test_merged_tokens_are_not_beside_what_has_all(option):
    with pytest.raises(UserError, match=f"--merge-tokens .* --{option}"):
        SavedModelOptions(SourceOptions("memory"), "served", merge_tokens=2, **{option: True})
