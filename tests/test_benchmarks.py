"""The comparison with other libraries: the rounds, failing peers, and the tables."""

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks import __main__ as command
from benchmarks import comparison, gpu
from benchmarks.case import Case
from benchmarks.comparison import Result, compare, flops
from benchmarks.input import __main__ as inputs
from export.inference_model import inference_model
from keras_vit import MODELS, UserError, build
from keras_vit.models.attention import DotProductAttention
from keras_vit.models.complexity import costs

TINY = Case("inference", "testing", 2, size=32, threads=1)


@pytest.mark.slow
def test_peers_run_in_turn_and_a_missing_library_is_reported():
    present, missing, limit = compare(TINY, ["keras_vit", "keras_hub", "matrix_product"], rounds=2)
    assert (len(present.seconds), len(limit.seconds)) == (2, 2)
    assert present.failure is limit.failure is None
    assert min(*present.seconds, present.first_call, present.prepare) > 0
    assert present.peak_bytes > 50e6
    assert "keras_hub" in missing.failure
    assert not missing.seconds
    text = "\n".join(command.table(TINY, [present, missing, limit]))
    assert "| keras_hub | failed: ModuleNotFoundError" in text
    assert "| 100% |" in text


@pytest.mark.slow
def test_a_training_step_runs():
    (ours,) = compare(Case("training", "testing", 4, size=32, precision="bfloat16", threads=1), ["keras_vit"], rounds=2)
    assert ours.failure is None
    assert len(ours.seconds) == 2


@pytest.mark.slow
def test_a_peer_killed_between_rounds_is_reported():
    with contextlib.ExitStack() as stack:
        victim = comparison.PeerProcess("matrix_product", TINY, stack)
        victim.run()
        victim.process.kill()
        victim.process.wait()
        victim.run()
        victim.run()
        result = victim.end()
    assert len(result.seconds) == 1
    assert result.failure


@pytest.mark.slow
def test_the_parent_process_loads_no_backend():
    code = "import sys, benchmarks.__main__, benchmarks.gpu; from benchmarks.comparison import *\n"
    code += "print(flops(Case('inference', 'testing', 1, size=32)), {'keras', 'tensorflow', 'jax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    operations, modules = done.stdout.split(maxsplit=1)
    assert int(operations) > 0
    assert modules.strip() == "set()"


@pytest.mark.slow
def test_flops_of_a_call():
    one = 2 * costs(MODELS["ViT-S_16"], (224, 224), num_classes=1000).multiply_adds
    assert flops(Case("inference", "ViT-S_16", 8)) == 8 * one
    assert flops(Case("training", "ViT-S_16", 1)) == 3 * one


@pytest.mark.slow
def test_flops_of_an_export_leave_out_unread_tokens():
    def products(model) -> int:
        """Multiplications and additions by the shapes in the graph."""
        total = 0
        for layer in model.layers:
            if isinstance(layer, DotProductAttention):
                (_, queries, width), (_, keys, _), _ = (tensor.shape for tensor in layer.input)
                total += 2 * queries * keys * width
            elif layer.weights and layer.weights[0].name == "kernel":
                total += math.prod(layer.output.shape[1:-1]) * layer.weights[0].value.numpy().size
        return 2 * total

    model = build(MODELS["testing"], image_size=32, num_classes=1000)
    assert flops(TINY, "keras_vit") == flops(TINY) == 2 * products(model)
    assert flops(TINY, "keras_vit_saved_model") == 2 * products(inference_model(model)) < flops(TINY)


@pytest.mark.usefixtures("counted")
def test_a_table_compares_with_the_reference_and_the_limit():
    case = Case("inference", "ViT-S_16", 8)
    second = flops(case) / 100e9  # at 100 GFLOP/s
    ours, other = (Result(name, (t, 2 * t, 3 * t), 1.0, 0.5, 10**9) for name, t in
                   (("keras_vit", second / 2), ("timm", second)))  # fmt: skip
    limit = Result("matrix_product", (2 * 3072**3 / 200e9,), 0.0, 0.0, 10**9)
    rows = {line.split(" | ")[0].strip("| "): line for line in command.table(case, [ours, other, limit])}
    assert "| 1.00x | 100 | 50% |" in rows["keras_vit"]
    assert "| 2.00x | 50 | 25% |" in rows["timm"]


@pytest.fixture(name="compare_by")
def _compare_by(monkeypatch) -> Callable[[Callable], None]:
    """A function that takes the place of measuring, in both commands."""

    def replace(compare: Callable) -> None:
        for module in (command, gpu):
            monkeypatch.setattr(module, "compare", compare)

    return replace


@pytest.mark.slow
def test_results_are_written_after_every_case(tmp_path, compare_by, capsys):
    result = Result("keras_vit", (0.1,), 1.0, 0.5, 10**9)
    compare_by(lambda case, peers, rounds: [result])
    command.main(["--cases", "phone", "--rounds", "1", "--output", str(tmp_path / "speed")])
    document = json.loads((tmp_path / "speed" / "results.json").read_text())
    assert document["cases"][0]["results"][0]["seconds"] == [0.1]
    assert "ViT-Ti_16, inference, batch 1, 224 px, float32, 1 thread" in (tmp_path / "speed/results.md").read_text()
    assert "| keras_vit | 100.0 (100.0 to 100.0) |" in capsys.readouterr().out


def test_a_number_of_rounds_is_positive():
    with pytest.raises(UserError, match="--rounds.*0"):
        command.main(["--rounds", "0"])


def test_on_a_gpu_a_batch_that_does_not_fit_is_halved(compare_by):
    tried = []

    def compare_up_to_32(case, peers, rounds):
        tried.append(case.batch)
        return [Result(peers[0], (0.5,) if case.batch <= 32 else (), 1.0, 0.5, 0, None if case.batch <= 32 else "OOM")]

    compare_by(compare_up_to_32)
    case, result = gpu.largest(Case("training", "ViT-S_16", 128, device="gpu"), "keras_vit_jax", 1)
    assert (tried, case.batch, result.failure) == ([128, 64, 32], 32, None)


def test_on_a_gpu_the_failure_is_reported_if_no_batch_fits(compare_by):
    compare_by(lambda case, peers, rounds: [Result(peers[0], (), 0.0, 0.0, 0, "OOM")])
    case, result = gpu.largest(Case("training", "ViT-S_16", 32, device="gpu"), "keras_vit_jax", 1)
    assert (case.batch, result.failure) == (8, "OOM")


@pytest.mark.slow
def test_on_a_gpu_rates_are_compared_between_different_batches(tmp_path, compare_by, monkeypatch, capsys):
    def compare_one(case, peers, rounds):
        if peers[0] == "transformers_compiled":
            return [Result(peers[0], (), 0.0, 0.0, 0, "OutOfMemory")]
        return [
            Result(peers[0], (case.batch / {"keras_vit_jax": 3000, "timm_compiled": 2000}.get(peers[0], 1),), 1, 1, 0)
        ]

    compare_by(compare_one)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    options = ["--models", "ViT-S_16", "--sizes", "224", "--tasks", "inference", "--output", str(tmp_path / "gpu")]
    gpu.main(options)
    text = (tmp_path / "gpu/results.md").read_text()
    assert "| keras_vit_jax | 2048 | 3,000 (3,000 to 3,000) | 1.00x |" in text
    assert "| timm_compiled | 2048 | 2,000 (2,000 to 2,000) | 1.50x |" in text
    assert "| transformers_compiled | | failed: OutOfMemory |" in text
    assert text.strip().endswith(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.slow
def test_without_a_gpu_the_command_says_so_and_runs_one_image_on_the_cpu(tmp_path, compare_by, monkeypatch, capsys):
    tried = []

    def compare_one(case, peers, rounds):
        tried.append((case.device, case.model, case.batch, peers[0]))
        return [Result(peers[0], (0.5,), 1.0, 0.5, 2 * 10**9)]

    compare_by(compare_one)
    monkeypatch.setenv("PATH", str(tmp_path))  # which has no nvidia-smi
    gpu.main(["--tasks", "training", "--output", str(tmp_path / "gpu")])
    assert capsys.readouterr().out.splitlines()[0].startswith("No GPU found, so ViT-Ti_16 runs with one image")
    assert {case[:3] for case in tried} == {("cpu", "ViT-Ti_16", 1)}
    assert [case[3] for case in tried] == ["matrix_product", "keras_vit_jax", "timm_compiled", "transformers_compiled"]
    assert "| 2.0 |" in (tmp_path / "gpu/results.md").read_text()


def test_input_pipelines_are_compared_round_by_round():
    seconds = {"keras_vit": [1.0, 2.0, 4.0], "timm": [2.0, 2.0, 4.0], "grain": []}
    lines = inputs.table(seconds, {"keras_vit": None, "timm": None, "grain": "No module named 'grain'"}, 64).split("\n")
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert cells[2] == ["keras_vit", "32", "16 to 64", "1.00 (1.00 to 1.00)"]
    assert cells[3] == ["timm", "32", "16 to 32", "1.00 (1.00 to 2.00)"]
    assert cells[4][:2] == ["grain", "failed: No module named 'grain'"]


@pytest.mark.slow
def test_an_input_pipeline_without_its_library_is_named_and_ours_are_timed():
    peers = ["keras_vit", "keras_vit_tfrecord", "minimal_loop", "grain"]
    rows = [line.split("|") for line in inputs.compare(peers, rounds=1, batches=1, images=80).splitlines()[2:]]
    assert [row[1].strip() for row in rows] == peers
    assert all(float(row[2]) > 0 for row in rows[:3])
    assert "No module named" in rows[3][2]
