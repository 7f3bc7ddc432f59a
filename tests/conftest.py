"""Fixtures that all tests share."""

import atexit
import dataclasses
import functools
import gc
import os
import pathlib
import random
import sys
import types
from collections.abc import Callable

import keras
import numpy as np
import pytest

import keras_vit
from keras_vit import ViTConfig
from keras_vit.run import Run
from tests.support import TINY, TINY_IMAGE, randomize
from training import demo
from training.options.common import DataOptions
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule


def pytest_collection_finish():
    """The modules live as long as the process: the garbage collector need not search TensorFlow's again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # nor at the end


@pytest.fixture(autouse=True)
def _seeded():
    # Not keras.utils.set_random_seed: with TensorFlow's seed, every function is optimized again.
    random.seed(7)
    np.random.seed(7)


@pytest.fixture(autouse=True, scope="session")
def _exact_on_a_gpu():
    """Golden data keep their tolerances on a GPU."""
    from keras_vit.models.build import exact_products

    with exact_products():
        yield


@pytest.fixture(autouse=True, scope="module")
def _graphs_as_traced(request):
    """To optimize the graph of a few images takes longer than to run it; the demo and the exports do it.

    So does the compilation of the form for a CPU, which the slow tests have.
    """
    folders = ["data", "detection", "devices", "evaluation", "experiments", "features", "loop", "objectives"]
    folders += ["outliers", "prediction", "recipes", "segmentation", "text"]
    if request.path.parent.name not in folders and request.path.name != "test_auto.py":
        yield
        return
    import tensorflow as tf

    with pytest.MonkeyPatch.context() as patch:
        if request.config.option.markexpr == "not slow":
            patch.setattr("training.loop.devices.kernels.on_cpu", lambda: False)
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
        yield
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@pytest.fixture(autouse=True)
def _op_determinism_ends_with_the_test():
    """`--deterministic` holds for a process, and XLA is not used with it; there is no public way back."""
    yield
    if config := sys.modules.get("tensorflow.python.framework.config"):
        config.disable_op_determinism()


@pytest.fixture(name="name_backend")
def _name_backend(monkeypatch) -> Callable[[str], None]:
    """Keras calls its backend so from now on."""
    return lambda name: monkeypatch.setattr("keras.backend.backend", lambda: name)


@pytest.fixture(name="on_jax")
def _on_jax(name_backend) -> None:
    """The backend of Keras calls itself JAX."""
    name_backend("jax")


@pytest.fixture(name="handed_over")
def _handed_over(monkeypatch) -> list[types.SimpleNamespace]:
    """What the commands hand over to training, which does not begin: options, setup, make_model and callbacks."""
    runs: list[types.SimpleNamespace] = []

    def run_training(options, setup, make_model, **others):
        runs.append(types.SimpleNamespace(options=options, setup=setup, make_model=make_model, **others))

    for command in ("pretrain", "finetune"):
        monkeypatch.setattr(f"training.loop.{command}.run_training", run_training)
    return runs


@pytest.fixture(name="compute_no_more")
def _compute_no_more(monkeypatch) -> Callable[[], None]:
    """From its call on, features of images must be read and not computed."""
    fails = functools.partial(pytest.fail, "features were computed again")
    return lambda: monkeypatch.setattr("training.features.extraction._computed", lambda *_: fails())


@pytest.fixture(name="models_read_once", scope="module")
def _models_read_once():
    """Each file of a model is read once, for tests whose commands change no weights."""
    from keras_vit.checkpoints import from_checkpoint

    load = from_checkpoint.load_named_model
    read = functools.cache(lambda path, _: load(pathlib.Path(path)))

    def load_once(path: pathlib.Path) -> keras.Model:
        files = [path, (path if path.is_dir() else path.parent) / "labels.txt"]
        return read(os.path.realpath(path), tuple(file.stat().st_mtime_ns for file in files if file.exists()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_checkpoint, "load_named_model", load_once)
        yield


@pytest.fixture(name="short_lock_wait")
def _short_lock_wait(monkeypatch) -> None:
    """A process does not wait for seconds until another has left a directory."""
    monkeypatch.setattr("keras_vit.files.atomic._WAIT", 0.0)


@pytest.fixture(name="tiny_images")
def _tiny_images() -> np.ndarray:
    return np.random.default_rng(3).uniform(-1.0, 1.0, (5, *TINY_IMAGE, 3)).astype(np.float32)


@pytest.fixture(name="tiny_model", scope="session")
def _tiny_model() -> keras.Model:
    """A classifier with random weights, for tests that change nothing of it."""
    return randomize(keras_vit.build(TINY, image_size=TINY_IMAGE, num_classes=7))


@pytest.fixture(name="demo_place", scope="session")
def _demo_place(tmp_path_factory) -> pathlib.Path:
    """A directory in which the demo has run, with half of its blocks and a twentieth of its epochs."""
    directory = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:  # in this process, which has imported everything
        patch.chdir(directory)
        model = dataclasses.replace(RECIPES["digits"].model, num_layers=2)
        patch.setitem(RECIPES, "digits", dataclasses.replace(RECIPES["digits"], model=model, epochs=4))
        demo.main([])
    return directory


@pytest.fixture(name="upstream", scope="session")
def _upstream(tmp_path_factory) -> Run:
    """A finished run of a tiny model on the digits, to start from."""
    from training.loop.pretrain import pretrain  # not for those who need no TensorFlow

    model = ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
    recipe = dataclasses.replace(
        RECIPES["digits"], model=model, epochs=2, batch_size=200, schedule=Schedule(warmup_steps=2)
    )
    folder = tmp_path_factory.mktemp("runs") / "upstream"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.loop.devices.kernels.on_cpu", lambda: False)  # whose form takes seconds to compile
        return pretrain(PretrainOptions(source=DataOptions("digits"), workdir=str(folder), recipe=recipe), "tiny")
