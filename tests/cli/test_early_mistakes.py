"""Mistakes in paths and names are reported before TensorFlow and Keras are imported, which takes seconds."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator

import pytest

from keras_vit import UserError
from keras_vit.files.atomic import locked
from training import finetune, predict, pretrain, samples, shard, study
from training.checks import check_outside
from training.data.checks import check_data, check_shard_folder
from training.options.common import DataOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import find_recipe

ROOT = pathlib.Path(__file__).parent.parent.parent
# Runs each line of stdin as a command; prints its sentence, or what it has imported.
SCRIPT = """
import contextlib, importlib, io, shlex, sys
from keras_vit import UserError
for line in sys.stdin:
    command, *arguments = shlex.split(line)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            importlib.import_module(command).main(arguments)
        print("nothing was wrong with", line)
    except UserError as error:
        print(error)
    except SystemExit as stop:  # of the parser
        print(stop.code, *printed.getvalue().split())
    if slow := {"tensorflow", "keras", "jax"} & set(sys.modules):
        sys.exit(f"{line} imported {slow}")
"""
DATA = "no folder 'gone'; --data folder:PATH"
KIND = "--data accepts digits, tfds:NAME[:CONFIG], folder:PATH, csv:FILE, tfrecord:GLOB or tar:GLOB, but was given"
NO_INDEX = "'gone'; make it by keras-vit embed"
NAME = "official checkpoint 'gone'"
RUN = "no run directory 'gone'"
TRAIN = "training.pretrain digits --workdir never"
TUNE = "training.finetune --workdir never"
MISTAKES = {
    f"{TRAIN} --data folder:gone": DATA,
    f"{TRAIN} --data pictures": KIND,
    "training.pretrain --data digits": "takes the name of a recipe first, such as auto, but was given '--data'",
    f"{TRAIN} --data digits --model.num-heads 7": "multiple of num_heads",
    f"{TRAIN} --data digits --workdri x": "2 ",
    f"{TRAIN} --data tfds:mnist --data-dir gone": "There is no folder 'gone'; --data-dir accepts",
    f"{TRAIN} --data digits --model-parallel 2": "--model-parallel applies only to KERAS_BACKEND=jax",
    f"{TRAIN} --data digits --data-service grpc://127.0.0.1:1": "No data service answers at",
    "training.segment fit --checkpoint x --data tfds:x --workdir never --data-service grpc://h:1": "--data-service",
    f"{TRAIN} --data digits --shard-weights": "--shard-weights applies only to KERAS_BACKEND=jax",
    f"{TUNE} --checkpoint gone --data digits": NAME,
    f"{TUNE} --checkpoint hf:gone --data digits": "must be hf:owner/name",
    f"{TUNE} --model ViT-B_61 --data digits": "There is no official model named",
    f"{TUNE} --checkpoint augreg:B_16 --data digits --image-size -64": "one or two whole numbers above 0",
    "training.evaluate --run tests/fixtures/brought/hf_ijepa_classifier --data digits": "is not a run directory to put",
    **{
        f"{command} README.md{rest}": "README.md is a text file; give a model: a"
        for command, rest in (
            ("training.predict pictures --run", ""),
            ("training.knn --run", " --data digits"),
            (f"{TUNE} --data digits --checkpoint", ""),
            ("training.vtab --workdir never --checkpoint", ""),
            ("keras_vit.inspection.__main__ --output never --checkpoint", ""),
            ("keras_vit.convert", " x.npz --layout npz"),
            ("export.onnx.__main__ --output never --run", ""),
        )
    },
    "training.evaluate --run gone --data digits": NAME,
    "training.predict --run augreg:B_16 README.md --port 80": "--port applies only to --serve; give that,",
    "keras_vit.convert tests/fixtures/vit_token.npz x.h5 --layout npz": "x.h5 should end in .npz, as files of",
    "keras_vit.convert tests/fixtures/vit_token.npz README.md --layout npz": "README.md already exists; give the name",
    "training.evaluate --run tests --data digits": "tests is not a finished run: it has no",
    f"{TRAIN} --data folder:tests/fixtures/hf_bit": "No class folders are in",
    "training.verify_official gone --data digits": "published accuracy named 'gone'",
    "training.fewshot --run gone --data digits": NAME,
    "training.linear_probe --checkpoint gone --data digits": NAME,
    "training.knn --run gone --data digits": NAME,
    "training.similar README.md --index gone": NO_INDEX,
    "training.study head --data folder:gone --workdir never": DATA,
    "training.vtab --checkpoint gone --workdir never": NAME,
    "training.soup gone other --output never": RUN,
    "training.shard --data folder:gone --output never": DATA,
    "training.shard --data digits --output docs": "docs should be new or empty, but holds api;",
    "training.samples --data folder:gone --output never": DATA,
    "training.predict --run gone README.md": NAME,
    "training.predict --run gone README.md --runner DirectRunner": "--runner needs --output with a folder for",
    "training.predict --run gone README.md -- --project x": "Options behind -- are those of a pipeline,",
    "training.embed --run gone README.md --output never": NAME,
    "training.embed --run gone --output never": "Give --data, such as folder:pictures, or",
    "training.embed --run gone --data digits --output never --runner DirectRunner": "no file 'digits'; with --runner",
    "training.embed --run gone README.md --output never --runner DirectRunner": "--runner needs Apache Beam, which",
    "training.shard --data csv:gone.csv --output never --runner SparkRunner": "no file 'gone.csv'; with --runner",
    "training.similar README.md --index gone --output x.txt": "--output accepts a file that ends in .csv or",
    "training.unknown --run gone --data digits": RUN,
    "training.anomaly fit --checkpoint gone --data gone --workdir never": "There is no folder 'gone'; --data accepts a",
    "training.anomaly fit --checkpoint gone --data docs --workdir docs": "docs exists and is not a run directory",
    "training.predict --run gone/model-int8.tflite README.md": "model-int8.tflite is an export",
    "keras_vit.convert gone x.npz --layout npz": NAME,
    f"{TRAIN} --data csv:gone.csv": "There is no file 'gone.csv'; --data",
    "training.segment fit --checkpoint augreg:B_16 --data docs --workdir never": "folder, give folder:docs.",
    f"{TRAIN} --data tfrecord:docs": "give 'tfrecord:docs/*.tfrecord'",
    f"{TRAIN} --data tfrecord:gone/*": "'gone/*' matches none",
    "training.segment fit --checkpoint gone --data tfds:x --workdir never": NAME,
    "training.segment fit --checkpoint augreg:B_16 --data folder:gone --workdir never": "no folder 'gone'; correct",
    "training.segment fit --checkpoint augreg:B_16 --data voc:tests --workdir never": "no folder 'tests/JPEGImages'",
    "training.pretrain digits --data digits --workdir tests": "tests exists and is not a run directory;",
    "training.pretrain mnist-small --data digits --workdir never --image-size 30": "multiple of the patch height 7",
    "keras_vit.inspection.__main__ --checkpoint gone --output never": NAME,
    "keras_vit.inspection.__main__ --checkpoint augreg:B_16 --output never": "has no images of its own; give --images",
    "keras_vit.inspection.__main__ --checkpoint augreg:B_16 --images gone --output never": "no image or folder 'gone'",
    "keras_vit.inspection.__main__ --checkpoint augreg:B_16 --figures map --output never": "--figures",
    "export.saved_model.__main__ --run gone --output never": NAME,
    "export.tflite.__main__ --run gone --output never": NAME,
    "export.tflite.__main__ --checkpoint augreg:B_16 --output README.md": "README.md is a file; --output accepts a",
    f"{TUNE} --data digits": "Say where to start: --checkpoint",
    "export.tflite.__main__ --run . --output never --formats float16 --calibration x": "--calibration applies only to",
    "training.predict --run augreg:B_16 README.md --labels gone": "There is no file 'gone'; --labels accepts a",
    "export.tflite.__main__ --run gone --output never --formats int8 --dynamic-batch": "--dynamic-batch applies",
    "export.onnx.__main__ --run gone --output never": NAME,
}


@pytest.fixture(name="in_folder", scope="module")
def _in_folder(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Mistakes in the names in a folder, and the words of their sentences."""
    tmp_path = tmp_path_factory.mktemp("mistakes")
    for folder, files in {
        "empty": ("ant/0.png", "ant/1.png", "bee/.hidden.png"),
        "few": ("ant/0.png", "ant/1.png", "bee/0.png", "bee/more/1.png"),
        "deep": ("two/three/four/ant/0.png", "two/three/four/bee/0.png"),
        "split": ("train/ant/0.png", "train/bee/0.png", "test/ant/0.png", "test/bee/0.png"),
    }.items():
        for file in files:
            (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / file).touch()
    run = tmp_path / "run"
    run.mkdir()
    for file, text in (("model.keras", ""), ("config.json", "{}"), ("labels.txt", "ant\ncat\n")):
        (run / file).write_text(text)
    with zipfile.ZipFile(run / "model.keras", "w"):
        pass
    (tmp_path / "list.csv").write_text("path,label\nfew/ant/0.png,ant\nfew/bee/0.png,bee\n")
    (tmp_path / "lost.csv").write_text("path,label\nfew/ant/0.png,ant\nfew\\bee\\0.png,bee\nfew/bee/9.png,bee\n")
    (tmp_path / "gone.csv").write_text("path,label\na/0.png,ant\nb/0.png,bee\n")
    place = f"; a path is relative to {tmp_path}: correct the paths"
    lost = f"1 of 3 files that {tmp_path}/lost.csv names are not there, such as few/bee/9.png{place}, or give "
    lost += "--on-bad-image skip."
    gone = f"2 of 2 files that {tmp_path}/gone.csv names are not there, such as a/0.png, b/0.png{place}."
    (tmp_path / "x.tflite").write_bytes(b"\x1c\0\0\0TFL3")
    options = PretrainOptions(source=DataOptions("digits"), workdir="", recipe=find_recipe("digits"))
    settings = options.settings("pretrain", "digits") | {"images": None}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"settings": settings}))
    again = f"training.pretrain digits --data digits --workdir {tmp_path}/other --strategy mirrored"
    (tmp_path / "three.txt").write_text("ant\nbee\ncat\n")
    labels = f"--labels {tmp_path}/three.txt"
    more = f"{tmp_path}/three.txt names 3 classes, but the model {run} has 2; give a line for each class of the model"
    digits = f"training.pretrain digits --workdir never --data folder:{tmp_path}"
    sentences = {
        f"{digits}/deep": "Only the class folder 'two' is in",
        f"{again} --seed 3": "other already holds another run, which differs in seed (there 0, here 3); choose",
        f"{again} --epochs 7": "which differs in recipe.epochs (there",
        f"{again} --model-parallel 2": "--model-parallel applies only to",  # the settings are the same
        f"{again.replace('digits', 'auto', 1)} --seed 3": "holds a run of training.pretrain with the "
        "recipe digits, but this one is of training.pretrain with the recipe auto; choose another",
        f"training.pretrain digits --workdir never --data csv:{tmp_path}/lost.csv": lost,
        f"training.pretrain digits --workdir never --data csv:{tmp_path}/gone.csv --on-bad-image skip": gone,
        f"{digits}/fevv": f"There is no folder '{tmp_path}/fevv'; --data folder:PATH takes",
        f"{digits}/emptty": f"There is no folder '{tmp_path}/emptty'; did you mean {tmp_path}/empty?",
        f"training.soup {tmp_path}/othr {run} --output never": f"did you mean {tmp_path}/other?",
        f"export.tflite.__main__ --run {tmp_path}/list.csv --output never": "list.csv is a text file; give a model",
        f"export.onnx.__main__ --run {tmp_path}/x.tflite --output never": "x.tflite is an export; give the run",
        **{
            f"export.{kind}.__main__ {model} --output {run}": f"{run} has the config.json of a run or checkpoint; give"
            for kind in ("saved_model", "tflite", "onnx")
            for model in (f"--run {run}", "--checkpoint augreg:B_16")
        },
        f"{digits}/list": f"There is no folder '{tmp_path}/list'; --data folder:PATH",  # list.csv is no folder
        f"{digits}/list.csv": f"; for this file, give --data csv:{tmp_path}/list.csv.",
        f"training.evaluate --run {run} --data folder:{tmp_path}/few": "only the run has cat and only the data",
        f"training.evaluate --run {run} --data csv:{tmp_path}/list.csv": "only the run has cat and only the data have",
        f"training.evaluate --run {run}/model.keras --data folder:{tmp_path}/split --output never": "only the run has",
        f"training.predict --run {run} README.md {labels}": more,
        f"training.predict --run {run}/model.keras README.md {labels}": "has 2; give a line for each class of the",
        f"export.tflite.__main__ --checkpoint {run} --output never {labels}": more,
        f"keras_vit.inspection.__main__ --checkpoint {run} --images README.md --output never {labels}": more,
    }
    (run / "checkpoints").mkdir()
    for file in ("samples.npz", "checkpoints/step-7.npz"):
        with zipfile.ZipFile(run / file, "w"):
            pass
    for file in ("samples.npz", "checkpoints/step-7.npz", "config.json", "labels.txt"):
        words = f"{run}/{file} is a file of a run, but not its model; give the run {run}."
        sentences[f"training.predict --run {run}/{file} README.md"] = words
    (tmp_path / "export").mkdir()
    for file in ("model.onnx", "labels.txt"):
        (tmp_path / "export" / file).write_bytes(b"\x08\n")
    exported = f"{tmp_path}/export/model.onnx"
    sentences[f"training.evaluate --run {exported} --data digits"] = f"{exported} is an export; give the run that"
    predict_with = "training.predict README.md --run"
    sentences |= {
        f"{predict_with} {tmp_path}": f"{tmp_path} is not a run, but holds runs; give one of them, such as {tmp_path}/",
        f"{predict_with} {run}/checkpoints": f"checkpoints is a folder of a run, but not the run itself; give {run}.",
        f"training.knn --run {tmp_path} --data digits": f"but holds runs; give one of them, such as {tmp_path}/",
    }
    damaged = shutil.copytree(run, tmp_path / "damaged")
    (damaged / "config.json").write_text('{"settings": {"recipe"')
    for command in (
        f"training.predict --run {damaged} README.md",
        f"training.predict --run {damaged}/model.keras README.md",
        f"training.evaluate --run {damaged} --data digits",
        f"export.saved_model.__main__ --run {damaged} --output never",
    ):
        sentences[command] = f"{damaged}/config.json cannot be read as the settings of a run ("
    sentences[f"training.pretrain digits --data digits --workdir {tmp_path}/busy"] = (
        f"Another process, {os.getpid()} on {socket.gethostname()}, writes into {tmp_path}/busy; wait until it ends"
    )
    with locked(tmp_path / "busy"):
        yield sentences


@pytest.fixture(name="sentences", scope="module")
def _sentences(in_folder) -> dict[str, str]:
    """What is said of each mistake; all in one process, which imports the commands once."""
    mistakes, command = [*MISTAKES, *in_folder], [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, input="\n".join(mistakes), capture_output=True, text=True)
    assert done.stderr == ""
    return dict(zip(mistakes, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_before_tensorflow_is_imported(mistake, sentences):
    assert MISTAKES[mistake] in sentences[mistake]
    assert not (ROOT / "never").exists()


def test_what_the_names_in_a_folder_say_is_reported_before_tensorflow_is_imported(sentences, in_folder):
    for mistake, words in in_folder.items():
        assert words in sentences[mistake]


@pytest.mark.parametrize(
    ("command", "first", "workdir"),
    [
        (pretrain, ["digits"], "gd"),
        (pretrain, ["digits"], "link/runs"),
        (finetune, ["--checkpoint", "augreg:B_16"], "gd/ant/../runs"),
        (study, ["head"], "gd/runs/one"),
    ],
)
def test_a_run_directory_in_the_folder_of_the_images_is_refused(command, first, workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("ant/0.png", "ant/1.png", "bee/0.png", "bee/1.png"):
        (tmp_path / "gd" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "gd" / file).touch()
    (tmp_path / "link").symlink_to("gd")
    size = ["--batch-size", "1", "--warmup-steps", "1"]
    with pytest.raises(UserError, match=f"folder of the data, but {workdir} is in"):
        command.main([*first, "--data", f"folder:{tmp_path}/gd", "--workdir", workdir, *size])


def test_only_a_run_directory_in_the_folder_of_the_images_is_refused(tmp_path):
    for workdir, data in ((f"{tmp_path}/gd-runs", f"{tmp_path}/gd"), ("gs://bucket/runs", "gs://bucket/run")):
        check_outside(workdir, f"folder:{data}")
    with pytest.raises(UserError, match="gs://bucket/gd/runs is in gs://bucket/gd/"):
        check_outside("gs://bucket/gd/runs", "folder:gs://bucket/gd/")


def test_a_path_without_its_kind_or_with_another_is_answered_with_what_to_give(tmp_path):
    listed = tmp_path / "list.CSV"
    listed.touch()
    folder, file = f"; for this folder, give --data folder:{tmp_path}.", f"; for this file, give --data csv:{listed}."
    for given, advice in (
        (str(tmp_path), f"{KIND} {str(tmp_path)!r}{folder}"),
        (str(listed), f"{KIND} {str(listed)!r}{file}"),
        (f"{tmp_path}/gone", f"{KIND} '{tmp_path}/gone'."),
        (f"csv:{tmp_path}", f", give --data folder:{tmp_path}"),
        (f"folder:{listed}", f", give --data csv:{listed}"),
    ):
        with pytest.raises(UserError) as refused:
            check_data(DataOptions(given))
        assert advice in str(refused.value)


@pytest.mark.parametrize(
    ("command", "found"), [(samples, "has the config.json of a run"), (shard, "should be new or empty, but holds .*")]
)
def test_a_data_set_is_not_written_into_a_run_directory(command, found, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"{tmp_path} {found}.*; give "):
        command.main(["--data", "digits", "--output", str(tmp_path)])
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", ["ant/0.png", "cat.jpg"])
def test_tfrecord_files_are_not_written_among_images(name, tmp_path):
    (tmp_path / "pictures" / name).parent.mkdir(parents=True)
    (tmp_path / "pictures" / name).touch()
    with pytest.raises(UserError, match="pictures should be new or empty, but holds"):
        shard.main(["--data", "digits", "--output", str(tmp_path / "pictures")])


def test_a_pipeline_goes_on_with_its_own_tfrecord_files(tmp_path):
    for name in ("train-00000-of-00001.tfrecord", "records.npz", "labels.txt", ".hidden", "labels.txt.12.tmp"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match="should be new or empty, but holds labels.txt"):
        check_shard_folder(str(tmp_path))
    for output in (tmp_path, tmp_path / "new"):
        assert check_shard_folder(str(output), is_pipeline=True) == output


def test_predict_names_a_saved_model_as_an_export_in_any_version(tmp_path):
    (tmp_path / "served" / "12").mkdir(parents=True)
    (tmp_path / "served" / "12" / "saved_model.pb").touch()
    for folder in (tmp_path / "served", tmp_path / "served" / "12"):
        with pytest.raises(UserError, match=f"^{folder} is an export"):
            predict.main(["--run", str(folder), "cat.jpg"])
