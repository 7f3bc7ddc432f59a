"""The comparison with other libraries: the rounds, failing peers, and the tables."""

import contextlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from benchmarks import __main__ as command
from benchmarks import comparison, gpu, history, start, trace
from benchmarks.case import Case
from benchmarks.comparison import Result, compare, flops
from benchmarks.input import augmented
from benchmarks.peers import SIDE
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


def results_of(milliseconds: float) -> list[Result]:
    """A case in which the limit of the machine is one millisecond."""
    limit = Result("matrix_product", (1e-3 * 2 * SIDE["cpu"] ** 3 / flops(TINY),), 0.0, 0.0, 0)
    return [Result("keras_vit", (milliseconds / 1e3,), 1.0, 0.5, 0), limit, Result("timm", (), 0, 0, 0, "no torch")]


@pytest.mark.usefixtures("counted")
def test_a_later_run_that_is_slower_is_named_beside_the_earlier_one(tmp_path):
    def run(date: str, processor: str, milliseconds: float) -> list[str]:
        return history.record(tmp_path / "h.csv", history.rows_of(date, processor, TINY, results_of(milliseconds)))

    assert run("2026-01-01", "A", 2.0) == []
    assert run("2026-02-01", "A", 2.02) == []  # noise
    (slower,) = run("2026-03-01", "A", 4.0)
    assert slower.startswith("keras_vit is slower than on 2026-02-01: 25% of the limit instead of 50%")
    (other,) = run("2026-04-01", "B", 9.0)
    assert other.startswith("keras_vit was measured on A only; not compared")
    assert run("2026-05-01", "B", 9.0) == []
    lines = (tmp_path / "h.csv").read_text().splitlines()
    assert lines[0] == "date,processor,case,peer,milliseconds,of_limit"
    assert len(lines) == 6
    assert lines[1].startswith('2026-01-01,A,"')
    assert lines[1].endswith(",keras_vit,2.0,0.5")
    (tmp_path / "h.csv").write_text("date\n2026\n")
    with pytest.raises(UserError, match="is no history of measurements"):
        run("2026-06-01", "A", 2.0)


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


def test_a_trace_gives_each_kind_of_operation_its_time_and_the_threads_that_are_busy_then():
    millisecond = 1e6  # in nanoseconds
    spans = [
        ("_FusedMatMul", 0, 4),
        ("MklSoftmax", 4, 5),
        ("Mean", 5, 6),
        ("AddV2", 6, 6.5),
        ("BatchMatMulV2", 8, 10),
        ("BatchMatMulV2", 8.5, 9.5),
    ]  # at the same time
    spans = [trace.Span(begin * millisecond, end * millisecond, name) for name, begin, end in spans]
    pool = [(0, 4), (2, 4), (8, 9), (9.5, 11)]  # two threads for two milliseconds
    helpers = [[trace.Span(begin * millisecond, end * millisecond)] for begin, end in pool]
    rows = {row[0]: row[1:] for row in trace.rows(trace.Trace(4.0, [4.5, 5.5], spans, helpers), limit_ms=1.5)}
    assert rows == {
        "products (FusedMatMul, BatchMatMulV2)": ("3.0", "60%", "1.2", "1.5"),  # (4 + 2 + 1 + 0.5) / 6
        "softmax (MklSoftmax)": ("0.5", "10%", "0.0", ""),
        "normalization (Mean)": ("0.5", "10%", "0.0", ""),
        "copies": ("0.0", "0%", "", ""),
        "others, element by element (AddV2)": ("0.2", "5%", "0.0", ""),
        "between the operations": ("0.8", "15%", "", ""),  # of 5 ms, 4.25 are in operations
    }


# In a process of its own, because the number of threads is set before TensorFlow computes anything.
_TRACE = """
import json
from benchmarks import trace
from benchmarks.case import Case

found = trace.trace_saved_model(Case("inference", "testing", 1, size=32, threads=1), calls=3)
kinds = [trace.kind_of(span.operation) for span in found.spans]
busy = sum(span.end - span.begin for span in trace.merged(found.spans)) / 1e6
print(json.dumps({"ms": found.milliseconds, "busy": busy, "traced": sum(found.traced), "kinds": kinds}))
"""


@pytest.mark.slow
def test_a_saved_model_is_traced():
    done = subprocess.run([sys.executable, "-c", _TRACE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ms"] > 0
    assert 0 < found["busy"] < found["traced"]  # every operation lies within a call
    assert {trace.PRODUCTS, "softmax"} <= set(found["kinds"])
    assert found["kinds"].count(trace.PRODUCTS) % 3 == 0  # as many in each call


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


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--models", "BiT-R50x1"], "no comparison for 'BiT-R50x1'"), (["--rounds", "0"], "--rounds must be at least 1")],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        command.main(options)


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
    with pytest.raises(UserError, match="no comparison for 'ViT-H_14'"):
        gpu.Arguments(models=("ViT-H_14",))


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
    lines = augmented.table(seconds, {"keras_vit": None, "timm": None, "grain": "No module named 'grain'"}, 64).split(
        "\n"
    )
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    assert cells[2] == ["keras_vit", "32", "16 to 64", "1.00 (1.00 to 1.00)"]
    assert cells[3] == ["timm", "32", "16 to 32", "1.00 (1.00 to 2.00)"]
    assert cells[4][:2] == ["grain", "failed: No module named 'grain'"]


@pytest.mark.slow
def test_an_input_pipeline_without_its_library_is_named_and_ours_is_timed(capsys):
    augmented.compare_augmented(rounds=1, batches=1, images=80, cores=1)
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| keras_vit")]
    assert float(rows[0][2]) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "points"), [("prediction", "imports model prediction"), ("training", "imports step epoch")]
)
def test_the_wait_at_the_start_is_measured_in_a_new_process(task, points):
    seconds = start.measure(task, "keras_vit")
    assert list(seconds) == points.split()
    assert 0.0 < seconds["imports"] < list(seconds.values())[1] < list(seconds.values())[2]


def test_the_table_of_the_start_has_medians_and_names_a_missing_library():
    missing = "ModuleNotFoundError: No module named 'keras_hub'"
    text = start.table({"prediction": {"keras_vit": [{"imports": 2.0}, {"imports": 1.0}], "keras_hub": [missing]}})
    assert "| keras_vit | 1.5 (1.0 to 2.0) |" in text
    assert re.search(r"\| keras_hub \| +failed \|", text)
    assert f"keras_hub failed: {missing}" in text
