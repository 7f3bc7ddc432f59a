"""Compiling for TPU chips without one: interrupted runs continue, failures are results, the largest batch."""

import dataclasses
import re
import sys
import types
from collections.abc import Callable

import pytest

from benchmarks import tpu, tpu_compile


def _compiled(case: tpu.TPUCase, gigabytes: float) -> dict:
    sizes = {"arguments": 0, "temporaries": gigabytes * 10**9, "code": 0}
    counts = {"flops": 2e12, "host_bytes": 3e6, "seconds": 60.0, "failure": None}
    return dataclasses.asdict(case) | sizes | counts


def test_for_a_tpu_the_largest_batch_is_extrapolated_from_two():
    few, many = (_compiled(tpu.TPUCase("digits", "training", "v5e", batch), 1 + batch / 10) for batch in (10, 20))
    assert tpu.largest_batch([many, few], 16 * 10**9) == 150
    assert tpu.largest_batch([few], 16 * 10**9) is None
    assert tpu.largest_batch([few, many | {"failure": "out of memory"}], 16 * 10**9) is None


@pytest.fixture(name="compile_by")
def _compile_by(monkeypatch) -> Callable[[Callable], None]:
    """A function that takes the place of the compiler, which is not needed then."""
    monkeypatch.setitem(sys.modules, "libtpu", types.SimpleNamespace(__spec__="libtpu"))
    return lambda compile_case: monkeypatch.setattr(tpu, "compile_case", compile_case)


def test_for_a_tpu_an_interrupted_run_continues(tmp_path, compile_by, capsys):
    tried = []

    def compile_some(case):
        tried.append((case.step, case.batch))
        if case.step == "jax":
            return dataclasses.asdict(case) | {"failure": "Error: a | b", "seconds": 9.0}
        return _compiled(case, case.batch / 10)

    compile_by(compile_some)
    options = ["--recipes", "digits", "--batches", "20", "10", "--output", str(tmp_path / "tpu")]
    tpu.main([*options, "--steps", "training"])
    tpu.main([*options, "--steps", "training", "jax"])
    assert tried == [("training", 10), ("training", 20), ("jax", 10), ("jax", 20)]
    text = (tmp_path / "tpu/results.md").read_text()
    assert [cell.strip() for cell in text.splitlines()[2].split("|")[1:8]] == [
        "digits", "training", "v5e", "10", "yes", "1", "171"
    ]  # fmt: skip
    assert "no: Error: a / b" in text
    assert text.strip() in capsys.readouterr().out


def test_for_a_tpu_random_numbers_come_from_the_generator_of_the_chip():
    types = "(tensor<3xui64>) -> (tensor<3xui64>, tensor<4x9xui32>)"
    module = f"""
    %output_state, %output = stablehlo.rng_bit_generator %7, algorithm = PHILOX : {types} loc(#loc1)
    %8 = stablehlo.slice %output_state [1:3] : (tensor<3xui64>) -> tensor<2xui64>"""
    found = tpu_compile.with_generator_of_the_chip(module)
    assert "PHILOX" not in found
    assert "algorithm = DEFAULT : (tensor<2xui64>) -> (tensor<2xui64>, tensor<4x9xui32>)" in found
    results = re.findall(r"^ *(%.*?) =", found, flags=re.MULTILINE)
    assert results == ["%output_chip_key", "%output_chip_state, %output", "%output_state", "%8"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["training", "remat", "evaluation", "jax"])
def test_a_model_of_two_blocks_compiles_for_a_tpu(step):
    pytest.importorskip("libtpu", reason="libtpu of benchmarks/requirements-tpu.txt is not installed")
    result = tpu.compile_case(tpu.TPUCase("mnist-notes", step, "v5e", 8))
    assert result["failure"] is None
    assert min(result[size] for size in ("arguments", "temporaries", "flops")) > 0
    assert result["host_bytes"] >= 4 * 8 * (28 * 28 + 1000)
