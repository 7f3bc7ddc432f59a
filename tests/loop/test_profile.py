"""The profiler: which steps it sees, and that a run leaves a trace that TensorBoard reads."""

import dataclasses
import pathlib
import types

import pytest
import tensorflow as tf

import keras_vit
from keras_vit import UserError
from training.loop import pretrain as pretraining
from training.loop.callbacks import ProfileSteps
from training.options.common import DataOptions, Execution
from training.options.train import PretrainOptions
from training.recipes.pretrain import RECIPES
from training.recipes.recipe import Schedule


@pytest.fixture(name="events")
def _events(monkeypatch) -> list[str]:
    """The calls of the profiler, which takes seconds to start."""
    events: list[str] = []
    profiler = types.SimpleNamespace(
        start=lambda folder: events.append(f"start {folder}"), stop=lambda: events.append("stop")
    )
    monkeypatch.setattr(tf.profiler, "experimental", profiler)
    return events


@pytest.mark.parametrize(
    ("begin", "end", "per_execution", "profiled"),
    [
        (0, 9, 1, [3, 4, 5]),
        (0, 9, 3, [3, 6]),  # steps 1 to 3 and 4 to 6
        (0, 9, 50, [9]),
        (3, 9, 1, [4, 5]),  # resumed
        (5, 9, 1, []),
        (0, 4, 1, [3, 4]),  # a shorter run
        (0, 2, 1, []),
    ],
)
def test_the_steps_of_the_option_are_profiled(begin, end, per_execution, profiled, events):
    done = begin
    profile = ProfileSteps(pathlib.Path("profile"), 3, 5, lambda: done, per_execution)
    seen = []
    while done < end:
        profile.on_train_batch_begin(0)
        running = events.count("stop") < len(events) - events.count("stop")
        done = min(done + per_execution, end)
        seen += [done] if running else []
        profile.on_train_batch_end(0)
    profile.stop()
    assert seen == profiled
    assert events == (["start profile", "stop"] if profiled else [])


def test_steps_count_from_1_and_are_put_in_order():
    with pytest.raises(UserError, match="--profile-steps must be at least 1, but is 0"):
        Execution(profile_steps=(0, 3))
    assert Execution(profile_steps=(5, 4)).profile_steps == (4, 5)


@pytest.mark.slow
def test_a_run_leaves_a_trace_of_its_steps(tmp_path):
    model = keras_vit.ViTConfig(patch_size=4, hidden_size=12, num_layers=1, num_heads=3, mlp_dim=20)
    recipe = dataclasses.replace(
        RECIPES["digits"], model=model, epochs=1, batch_size=400, schedule=Schedule(warmup_steps=1)
    )
    options = PretrainOptions(
        source=DataOptions("digits"), workdir=str(tmp_path / "run"), recipe=recipe,
        execution=Execution(profile_steps=(2, 3)),
    )  # fmt: skip
    run = pretraining.pretrain(options, "tiny")
    (trace,) = (run.path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    assert trace.parent.parent.relative_to(run.path).as_posix() == "profile/plugins/profile"
