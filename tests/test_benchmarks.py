"""The comparison with other libraries: the rounds, failing peers, and the tables."""

import contextlib
import math
from collections.abc import Callable

import pytest

import benchmarks.input as inputs
from benchmarks import __main__ as command
from benchmarks import comparison, gpu
from benchmarks.case import Case
from benchmarks.comparison import Result, compare, flops
from export.inference_model import inference_model
from keras_vit import MODELS, build
from keras_vit.models.attention import DotProductAttention
from keras_vit.models.complexity import costs

TINY = Case("inference", "testing", 2, size=32, threads=1)
FULL = Case("training", "ViT-S_16", 128, device="gpu")


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


@pytest.fixture(name="compare_by")
def _compare_by(monkeypatch) -> Callable[[Callable], None]:
    """A function that takes the place of measuring, in both commands."""

    def replace(compare: Callable) -> None:
        for module in (command, gpu):
            monkeypatch.setattr(module, "compare", compare)

    return replace


def test_on_a_gpu_a_batch_that_does_not_fit_is_halved(compare_by):
    tried = []

    def compare_up_to_32(case, peers, rounds):
        tried.append(case.batch)
        seconds, failure = ((0.5,), None) if case.batch <= 32 else ((), "CUDA out of memory.")
        return [Result(peers[0], seconds, 1.0, 0.5, 0, failure)]

    compare_by(compare_up_to_32)
    case, result = gpu.measured(FULL, "keras_vit_jax", 1, is_largest=True)
    assert (tried, case.batch, result.failure) == ([128, 64, 32], 32, None)


def test_on_a_gpu_a_missing_library_is_reported_after_one_try(compare_by):
    tried = []
    compare_by(
        lambda case, peers, rounds: tried.append(case) or [Result(peers[0], (), 0, 0, 0, "No module named timm")]
    )
    assert gpu.measured(FULL, "timm_compiled", 1, is_largest=True)[1].failure
    assert len(tried) == 1


def test_the_quick_cases_of_a_gpu_are_few_and_all_cases_have_sizes_of_whole_patches(monkeypatch):
    monkeypatch.setattr(gpu, "flops", lambda case: 35_000_000_000 * (case.size // 224) ** 2)
    monkeypatch.setattr(gpu.importlib.metadata.Distribution, "discover", lambda name: iter(()))
    quick = gpu.cases(gpu.Arguments(quick=True), "H100")
    assert [(case.model, case.task, case.batch) for case, *_ in quick[:3]] == [
        ("ViT-B_16", "inference", 1),
        ("ViT-B_16", "inference", 1024),
        ("ViT-B_16", "training", 512),
    ]
    assert {peers for *_, peers in quick} == {("keras_vit_jax", "timm_compiled")}
    monkeypatch.setattr(gpu.importlib.metadata.Distribution, "discover", lambda name: iter([name]))
    assert gpu.cases(gpu.Arguments(quick=True), "H100")[0][2] == ("keras_vit_jax", "timm_compiled", "keras_vit")
    everything = gpu.cases(gpu.Arguments(), "H100")
    assert {case.size for case, *_ in everything if case.model == "ViT-H_14"} == {224, 378}
    assert {case.model for case, *_ in everything} >= {"BiT-R50x1", "R50+ViT-B_16"}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["inference", "training"])
def test_the_benchmark_of_gpus_times_the_step_of_the_product_on_jax(task):
    (result,) = compare(Case(task, "testing", 2, size=32, precision="bfloat16"), ["keras_vit_jax"], rounds=2)
    assert result.failure is None
    assert len(result.seconds) == 2


@pytest.mark.slow
def test_an_input_pipeline_without_its_library_is_named_and_ours_are_timed():
    peers = ["keras_vit", "keras_vit_tfrecord", "minimal_loop", "timm"]
    rows = [line.split("|") for line in inputs.compare(peers, rounds=1, batches=1, images=80).splitlines()[2:]]
    assert [row[1].strip() for row in rows] == peers
    assert all(float(row[2]) > 0 for row in rows[:3])
    assert "No module named" in rows[3][2]
