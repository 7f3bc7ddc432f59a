"""report.html and predictions.csv: what was wrong, as images; the run's own data; comparison with another model."""

import csv
import json
import pathlib
from collections.abc import Sequence

import numpy as np
import PIL.Image
import pytest
import tensorflow as tf

import keras_vit
from keras_vit import Preprocessing, UserError
from keras_vit.run import Run
from tests.browser import open_browser
from tests.support import TINY, randomize
from training import evaluate as command
from training.data.dataset import Split
from training.evaluation.intervals import of_share
from training.evaluation.predictions import (
    Comparison,
    Prediction,
    comparison_sentence,
    one_class,
    several_classes,
    write_predictions,
)
from training.evaluation.report import Report, Subject, html_report

pytestmark = pytest.mark.usefixtures("models_read_once")

NAMES = ("ant", "bee", "<b>cat")
# Two right, and two wrong, of which the second has the less probable label.
LOGITS = np.log([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.05, 0.9, 0.05], [0.1, 0.2, 0.7]])
FILES = ("data/ant/1.png", "data/ant/2.png", "data/<b>cat/3.png", "data/<b>cat/4.png")
_, MISTAKES = one_class(FILES, LOGITS, np.array([0, 0, 2, 2]), NAMES)


def split_of(files: tuple[str, ...] = FILES, *, broken: int | None = None) -> Split:
    pixels = np.random.default_rng(0).integers(0, 256, (len(files), 40, 300, 4), np.uint8)
    encoded = [b"none" if n == broken else tf.io.encode_png(image).numpy() for n, image in enumerate(pixels)]
    data = tf.constant(encoded)
    return Split(len(files), lambda index: (data[index], tf.constant(0)), files.__getitem__)


def page_of(
    mistakes: Sequence[Prediction] = MISTAKES, names=NAMES, confusion=None, *, broken: int | None = None
) -> str:
    metrics = {
        "accuracy": 0.5,
        "intervals": {"accuracy": [0.2, 0.8]},
        "classes": {
            name: {"num_examples": 2 * (n != 1), "recall": 0.5, "precision": 1.0} for n, name in enumerate(names)
        },
        "confusion": [[1, 1, 0], [0, 0, 0], [0, 1, 1]] if confusion is None else confusion,
    }
    subject = Subject("a <title>", pathlib.Path(), split_of(broken=broken), root="data")
    measures = {"accuracy": "accuracy"}
    return html_report(
        Report(subject=subject, metrics=metrics, measures=measures, headline="Accuracy 50%", mistakes=mistakes)
    )


def test_the_page_begins_with_the_mistakes_as_images_and_needs_no_network():
    page = page_of()
    assert page.index("data:image/jpeg") < page.index("<h2>Classes")
    assert page.index("cat/3.png") < page.index("ant/2.png")  # the worst first, without the folder of all
    assert page.count("<article") == 2
    assert "data/ant" not in page
    assert "1.png" not in page
    assert "<b>cat" not in page.replace("<b>&lt;b&gt;cat", "")
    assert "http" not in page.split("<body")[1]
    assert "no image" in page  # of the class without any


def test_an_image_that_cannot_be_shown_costs_no_other():
    page = page_of(broken=2)
    assert page.count("cannot be shown") == page.count("data:image/jpeg") == 1


def test_many_classes_are_listed_as_the_most_confused_pairs():
    names = tuple(f"class {n}" for n in range(1000))
    confusion = np.diag(np.full(1000, 50))
    confusion[3, 7], confusion[8, 2] = 5, 50
    page = page_of([], names, confusion.tolist())
    assert 'class="matrix"' not in page
    pairs = page.split("Which classes are taken for which?")[1]
    assert pairs.index("class 8") < pairs.index("class 3")
    assert "--share: 0.5000" in pairs
    assert "None: every image is classified as it is labeled" in page


def test_mistakes_of_several_classes_are_ordered_by_their_worst_decision():
    truth = np.array([[1, 0], [1, 1], [0, 0]], bool)
    logits = np.array([[-1.0, -2.0], [3.0, -4.0], [-1.0, -1.0]])
    predictions, mistakes = several_classes("abc", logits, truth, ("x", "y"))
    assert [mistake.index for mistake in mistakes] == [1, 0]
    assert (mistakes[0].label, mistakes[0].predicted, mistakes[0].worst) == (("x", "y"), ("x",), "y")
    assert (mistakes[1].label, mistakes[1].predicted) == (("x",), ())
    page = page_of(mistakes)
    assert "surest mistake: y 2%" in page
    assert '<b class="wrong">none</b>' in page
    assert predictions[1].probabilities == pytest.approx([1.0 / (1.0 + np.exp(-3.0))])
    assert [each.correct for each in predictions] == [False, False, True]


def test_a_name_in_predictions_csv_is_no_formula_unless_cells_are_raw(tmp_path):
    predictions, _ = one_class(("=1.png",), LOGITS[:1], np.array([0]), NAMES)
    for raw, cell in ((False, "'=1.png,ant,ant,0.8"), (True, "=1.png,ant,ant,0.8")):
        write_predictions(tmp_path / "predictions.csv", predictions, raw=raw)
        assert (tmp_path / "predictions.csv").read_text().splitlines()[1].startswith(cell)


def test_the_interval_of_a_share_is_wilsons_and_not_a_point_where_all_are_right():
    low, high = of_share(61, 86)
    assert (low, high) == (pytest.approx(0.6061, abs=1e-4), pytest.approx(0.7947, abs=1e-4))
    assert of_share(20, 20)[0] == pytest.approx(20 / (20 + 1.96**2), abs=1e-4)


@pytest.mark.parametrize(("gained", "within_noise"), [(4, True), (12, False)])
def test_a_difference_is_noise_unless_mcnemars_test_says_otherwise(gained, within_noise):
    files = tuple(map(str, range(40)))
    labels = np.zeros(40, np.int64)
    now, _ = one_class(files, np.tile([2.0, 0.0], (40, 1)), labels, NAMES[:2])  # all are right
    then = Comparison("runs/old", {file: int(file) >= gained for file in files})
    found = then.measure(now)
    assert found["within_noise"] == within_noise
    assert found["p_value"] == pytest.approx(2 * 0.5**gained)
    assert found["difference"] == pytest.approx(gained / 40)
    assert ("within the noise" in comparison_sentence(found)) == within_noise
    with pytest.raises(UserError, match="runs/old was evaluated on other images: 40 of its 40 are among the 41 of now"):
        then.check_images([*files, "more"])


@pytest.fixture(name="place", scope="module")
def _place(tmp_path_factory) -> pathlib.Path:
    """A folder of images, and a run that was trained on it."""
    place = tmp_path_factory.mktemp("evaluated")
    rng = np.random.default_rng(0)
    for split, count in (("train", 2), ("test", 6)):
        for name in ("ant", "bee", "cat"):
            (place / "data" / split / name).mkdir(parents=True)
            for n in range(count):
                image = PIL.Image.fromarray(rng.integers(0, 256, (16, 20, 3), np.uint8))
                image.save(place / "data" / split / name / f"{n}.png")
    run = Run.at(place / "run")
    source = {"data": f"folder:{place / 'data'}", "data_dir": None, "train_split": "train", "eval_split": None}
    run.start({"command": "test", "source": source, "recipe": {}}, ("ant", "bee", "cat"))
    run.save_model(randomize(keras_vit.build(TINY, preprocessing=Preprocessing((12, 30)), num_classes=3)))
    return place


def test_a_run_is_evaluated_on_its_own_data(place, tmp_path, capsys):
    command.main(["--run", str(place / "run"), "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert f"Data: folder:{place / 'data'}, on which {place / 'run'} was trained" in printed
    metrics = json.loads((tmp_path / "evaluation.json").read_text())
    with (tmp_path / "predictions.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == metrics["num_examples"] == 18
    assert list(rows[0]) == ["file", "label", "predicted", "probability", "correct"]
    assert sum(row["correct"] == "True" for row in rows) == metrics["num_correct"]
    assert all((row["label"] == row["predicted"]) == (row["correct"] == "True") for row in rows)
    assert all(pathlib.Path(row["file"]).is_file() and 1 / 3 <= float(row["probability"]) <= 1 for row in rows)
    assert (tmp_path / "report.html").read_text().count("<article") == 18 - metrics["num_correct"]
    command.main(["--run", str(place / "run"), "--output", str(tmp_path / "again"), "--compare", str(tmp_path)])
    assert "+0.0 points of accuracy" in capsys.readouterr().out
    assert json.loads((tmp_path / "again" / "evaluation.json").read_text())["comparison"]["within_noise"]


def test_without_data_what_knows_none_and_data_that_are_gone_are_refused(place, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="There is no file or folder .*gone"):
        command.main(["--run", str(tmp_path / "gone")])
    with pytest.raises(UserError, match="predictions.csv.; --compare accepts the directory of an earlier report"):
        command.main(["--run", str(place / "run"), "--output", str(tmp_path), "--compare", str(tmp_path)])
    with pytest.raises(UserError, match="model.keras does not say what it was trained on; give --data"):
        (tmp_path / "alone").mkdir()
        (tmp_path / "alone" / "model.keras").write_bytes((place / "run" / "model.keras").read_bytes())
        command.main(["--run", str(tmp_path / "alone" / "model.keras")])
    (place / "data").rename(place / "moved")
    try:
        with pytest.raises(UserError, match="There is no folder"):
            command.main(["--run", str(place / "run")])
    finally:
        (place / "moved").rename(place / "data")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_sorted_and_filtered_and_fits_the_window(width, tmp_path):
    (tmp_path / "report.html").write_text(page_of())
    with open_browser() as page:
        page.open((tmp_path / "report.html").as_uri(), width)
        assert page.overflow() <= 0
        hidden = "(part => part.scrollWidth - part.clientWidth)(document.querySelector('.bars').parentElement)"
        assert page.evaluate(hidden) <= 0  # both scores of a class are there without scrolling
        shown = "[...document.querySelectorAll('#mistakes article:not([hidden]) small')].map(name => name.textContent)"
        choose = "(([id, value]) => {{ const list = document.getElementById(id); list.value = value; " + (
            "list.dispatchEvent(new Event('change')); }})({})"
        )
        assert page.evaluate(shown) == ["<b>cat/3.png", "ant/2.png"]
        page.evaluate(choose.format(json.dumps(["order", "label"])))
        assert page.evaluate(shown) == ["<b>cat/3.png", "ant/2.png"]
        page.evaluate(choose.format(json.dumps(["order", "unsure"])))
        assert page.evaluate(shown) == ["ant/2.png", "<b>cat/3.png"]
        page.evaluate(choose.format(json.dumps(["class", "ant"])))
        assert page.evaluate(shown) == ["ant/2.png"]
        assert page.evaluate("document.getElementById('count').textContent") == "1 image"
        rows = "[...document.querySelectorAll('#bars th')].map(cell => cell.textContent)"
        page.evaluate(choose.format(json.dumps(["rows", "name"])))
        assert page.evaluate(rows) == ["<b>cat", "ant", "bee"]
        assert not page.problems
