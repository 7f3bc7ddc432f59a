"""Runs with each technique: that a killed one ends in the same bits, and which options are refused."""

import pathlib
import shlex

import numpy as np
import pytest

from keras_vit import UserError
from keras_vit.files.keras_model import MODEL, load_model
from keras_vit.run import Run
from tests.interruptions import killed_after
from training import finetune, pretrain

DIGITS = "digits --data digits --epochs 2 --batch-size 200 --warmup-steps 2"
SMALL = f"{DIGITS} --model.num-layers 1 --model.hidden-size 12 --model.mlp-dim 20"
HARD = "--distillation hard --model.classifier token --model.distillation head"
LORA = "--recipe mnist-finetune --data digits --checkpoint {} --image-size 8 8 --batch-size 8 --steps 4 --lora-on query"
LORA += " out --warmup-steps 0 --decay constant"
WITHOUT_LABELS = "--data digits --image-size 8 8 --channels 1 --batch-size 200 --epochs 2 --warmup-steps 1"
FROM = f"{WITHOUT_LABELS} --deterministic --checkpoint {{}} --layer-decay 0.8 --checkpoint-every 1 --knn-every 1"
DINO = "--local-size 4 --local-crops 1 --prototypes 12 --head-width 16"
RESUMED = {
    "patch dropout": (f"{SMALL} --patch-dropout 0.5", 7),
    "sharpness": (f"{SMALL} --sharpness-radius 0.05", 7),
    "patch sizes": (f"{SMALL} --patch-sizes 2 4", 7),
    "muon": (f"{SMALL} --optimizer muon --accumulation 2 --checkpoint-every 4", 4),
    "adapters": (f"{LORA} --lora 2 --evaluate-every 2 --ema-decay 0.5", 2),
    "soft": (f"{SMALL} --mixup 0.2 --teacher {{}} --temperature 2", 7),
    "hard": (f"{SMALL} --mixup 0.2 --teacher {{}} {HARD}", 7),
    "features": (f"{SMALL} --model.patch-size 2 --teacher {{}} --distil features --deterministic", 7),
    "MAE": (f"mnist-mae {FROM} --decoder-layers 1 --decoder-width 32 --corruption 0.5", 9),
    "masked patches": (f"mnist-masked-patch {FROM}", 9),
    "next patches": (f"mnist-next-patch {WITHOUT_LABELS} --model.num-layers 1 --deterministic --checkpoint-every 1", 9),
    "DINO": (f"mnist-dino {FROM} {DINO} --accumulation 2", 9),
}


def train(command: str, upstream: pathlib.Path, workdir: pathlib.Path) -> None:
    arguments = [part.format(upstream) for part in shlex.split(command)]
    (finetune if arguments[0].startswith("-") else pretrain).main([*arguments, "--workdir", str(workdir)])


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_killed_run_ends_in_the_same_bits_and_metrics(name, upstream, tmp_path):
    command, step = RESUMED[name]
    train(command, upstream.path, tmp_path / "undisturbed")
    with killed_after(step):
        train(command, upstream.path, tmp_path / "killed")
    assert not (tmp_path / "killed" / MODEL).exists()
    train(command, upstream.path, tmp_path / "killed")
    runs = [Run.at(tmp_path / name) for name in ("undisturbed", "killed")]
    for here, there in zip(*(load_model(run.path).get_weights() for run in runs), strict=True):
        np.testing.assert_array_equal(here, there)
    losses = [[{n: x for n, x in record.items() if "loss" in n} for record in run.metrics()] for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (LORA.replace("query out", "querry --lora 2"), "--lora-on querry names no layer .*query,"),
        (f"{DIGITS} --lora 2", "--lora applies only to keras-vit finetune"),
        (f"{SMALL} --patch-sizes 3", "image height must be a multiple of the patch height"),
        (f"{SMALL} --patch-sizes 2 4 --remat", "cannot be combined with remat"),
        (f"{SMALL} --patch-sizes 2 4 --model.position-embedding relative", "learned positions only, not .*relative"),
        (f"{SMALL} --patch-dropout 0.5 --patch-sizes 2 4", "a run takes one"),
        (f"{SMALL} --patch-dropout 0.5 --model.position-embedding rotary", "positions at its input"),
        (f"{DIGITS} --teacher x --loss sigmoid", "--loss applies only to labels"),
        (f"{DIGITS} --distillation hard", "--distillation applies only to --teacher"),
        (f"{DIGITS} --teacher x --target patch-color --label-smoothing 0", "--teacher applies only to --target"),
        (f"{SMALL} --teacher {{}} --distillation hard", "give --model.distillation head or a distilled checkpoint"),
        (f"{DIGITS} --teacher x --distil features --temperature 2", "--temperature applies only to"),
        (f"{DIGITS} --teacher x --distil features --patch-dropout 0.5", "Of --distillation features"),
        (f"{DIGITS} --checkpoint {{}}", "for classes, keras-vit finetune takes"),
        ("auto --data digits --checkpoint {}", "to recipes without labels"),
        (f"mnist-dino {WITHOUT_LABELS} {DINO} --remat", "leave --remat out"),
        (f"{DIGITS} --knn-every 1", "--knn-every applies only to recipes without labels"),
        ("mnist-mae --data digits --checkpoint {} --model.hidden-size 8", "has no effect; leave it out"),
    ],
)
def test_options_that_do_not_fit_are_refused_and_leave_nothing(command, words, upstream, tmp_path):
    with pytest.raises(UserError, match=words):
        train(command, upstream.path, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_adapters_of_the_chosen_layers_and_the_head_are_trained_and_merged(upstream, tmp_path):
    train(f"{LORA} --lora 2", upstream.path, tmp_path / "run")
    before, after = (load_model(path) for path in (upstream.path, tmp_path / "run"))
    changes = {new.path: np.array(new) - np.array(old) for old, new in zip(before.weights, after.weights, strict=True)}
    for path, change in changes.items():
        layer, _, name = path.partition("/")
        adapted = layer.endswith((".query", ".out")) and name == "kernel"
        assert np.any(change) == (adapted or layer == "head"), path
        if adapted:
            assert np.linalg.matrix_rank(change, tol=1e-6) == 2
