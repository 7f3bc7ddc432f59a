"""Compiling for TPU chips without one: interrupted runs continue, failures are results, the largest batch."""

import dataclasses
import re
import sys
import types
from collections.abc import Callable

import pytest

from benchmarks import tpu, tpu_compile, tpu_traffic
from keras_vit import UserError


def _compiled(case: tpu.TPUCase, gigabytes: float) -> dict:
    sizes = {"arguments": 0, "results": 0, "shared": 0, "temporaries": gigabytes * 10**9, "code": 0}
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

    def compile_some(case, minutes):
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


PROGRAM = """HloModule step
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}
%block (state: (s32[], bf16[8,4])) -> (s32[], bf16[8,4]) {
  %all-gather.1 = bf16[8,4]{1,0:T(8,128)} all-gather(%part), replica_groups=[2,8]<=[16], dimensions={0}
}
ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %all-reduce.2 = (f32[10]{0}, f32[6]{0}) all-reduce(%a, %b), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %reduce-scatter.3 = f32[4]{0} reduce-scatter(%c), replica_groups={{0,1,2,3}}, to_apply=%add
  %start = (f32[4]{0}, f32[16]{0}) all-gather-start(%d), replica_groups={{0,1,2,3}}, dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %loop = (s32[], bf16[8,4]) while(%init), condition=%add, body=%block, backend_config={"known_trip_count":{"n":"47"}}
}
"""


def test_what_chips_send_is_counted_by_kind_and_for_every_turn_of_a_loop():
    gathered = 47 * (8 * 4 * 2) * 7 // 8 + 16 * 4 * 3 // 4
    assert tpu_traffic.traffic(PROGRAM) == {
        "all-reduce": 2 * 16 * 4 * 3 // 4, "reduce-scatter": 4 * 4 * 4 * 3 // 4, "all-gather": gathered
    }  # fmt: skip


LOOP = """HloModule step
%more (state: (f32[4], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(8), metadata={}
  %state = (f32[4]{0}, u32[]{:T(128)}) parameter(0)
  %counter = u32[] get-tuple-element(%state), index=1
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}
%first (x: f32[4]) -> f32[16] {
  %gather.1 = f32[16]{0} all-gather(%x), channel_id=7, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
}
%second (x: f32[4]) -> f32[16] {
  %gather.2 = f32[16]{0} all-gather(%x), channel_id=7, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
}
%turn (state: (f32[4], u32[])) -> (f32[4], u32[]) {
  %state.1 = (f32[4]{0}, u32[]{:T(128)}) parameter(0)
  %old = u32[] get-tuple-element(%state.1), index=1
  %two = u32[]{:T(128)} constant(2)
  %started = f32[16] fusion(%x), kind=kLoop, calls=%first
  %finished = f32[16] fusion(%started), kind=kLoop, calls=%second
  %new = u32[] add(%old, %two), metadata={}
  %next = f32[4]{0} fusion(%finished), kind=kLoop, calls=%other
  ROOT %states = (f32[4]{0}, u32[]{:T(128)}) tuple(%next, %new)
}
ENTRY %main (p: f32[4]) -> f32[4] {
  %loop = (f32[4]{0}, u32[]) while(%init), condition=%more, body=%turn, metadata={}
}
"""


def test_turns_of_a_loop_are_read_from_its_condition_and_a_repeated_channel_counts_once():
    for limit in (7, 8):  # in steps of two
        program = LOOP.replace("constant(8)", f"constant({limit})")
        assert tpu_traffic.traffic(program) == {"all-gather": 4 * (16 * 4) * 3 // 4}


@pytest.mark.parametrize(("part", "other"), [("constant(2)", "parameter(1)"), ("direction=LT", "direction=NE")])
def test_a_loop_that_sends_and_whose_turns_are_unknown_is_no_figure(part, other):
    with pytest.raises(ValueError, match="How often the loop turn runs is not found"):
        tpu_traffic.traffic(LOOP.replace(part, other))


def test_for_a_slice_there_is_a_table_of_its_own(tmp_path, compile_by, capsys):
    def compile_some(case, minutes):
        if case.recipe == "vit-g14":
            return dataclasses.asdict(case) | {"failure": "Error: a | b", "seconds": 9.0}
        found = {"traffic": {"all-gather": 2 * 10**9}, "step_flops": 197e11}
        return _compiled(case, case.batch / 10) | found

    compile_by(compile_some)
    options = ["--recipes", "vit-G14", "vit-g14", "--topology", "v5e:4x4", "--batches", "20", "10"]
    tpu.main([*options, "--output", str(tmp_path / "slices")])
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("| vit-G14"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "vit-G14", "v5e:4x4", "10", "yes", "1", "171", "19.7", "2", "100", "10", "60"
    ]  # fmt: skip
    assert "no: Error: a / b" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--topology", "v5e:16"], "--topology takes v5e or v6e and a grid of chips, such as v5e:4x4, not 'v5e:16'"),
        (["--recipes", "digitz"], "no recipe named 'digitz'"),
        (["--batches", "0"], "--batches takes positive numbers"),
        (["--minutes", "0"], "--minutes must be positive"),
    ],
)
def test_for_a_tpu_invalid_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        tpu.main(options)


def test_for_a_tpu_a_missing_compiler_is_named_with_its_requirements(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(UserError, match="libtpu is not installed; run pip install -r benchmarks/requirements-tpu.txt"):
        tpu.main(["--output", str(tmp_path / "tpu")])


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
    result = tpu.compile_case(tpu.TPUCase("mnist-notes", step, "v5e", 8), minutes=20)
    assert result["failure"] is None
    assert min(result[size] for size in ("arguments", "temporaries", "flops")) > 0
    assert result["host_bytes"] >= 4 * 8 * (28 * 28 + 1000)
