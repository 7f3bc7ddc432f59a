"""Compares the speed of this project with other libraries. `make bench` runs all cases; this command runs some:

    python -m benchmarks --cases inference --models ViT-B_16 --rounds 9 --output speed

Each peer has its own process and the same number of threads. The peers run in turn, one call each. The product of two
large matrices runs too, as the limit of the machine. The command writes results.json and results.md.
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Literal, get_args

from benchmarks.case import Case, processor
from benchmarks.comparison import LIMIT, REFERENCE, Result, compare, flops, rate, write_results
from keras_vit import cli
from keras_vit.cli import parser
from keras_vit.cli.options import Count
from keras_vit.files.remote import output_folder

Cases = Literal["inference", "bfloat16", "training", "training-bfloat16", "families", "phone"]
_ALL: tuple[Cases, ...] = get_args(Cases)

_ViT = Literal["ViT-Ti_16", "ViT-S_16", "ViT-B_16"]
_ARTIFACTS = ("keras_vit_saved_model", "keras_vit_onnx", "keras_vit_openvino")
_TFLITE = ("keras_vit_tflite", "keras_vit_tflite_int8")
_OTHERS = ("keras_hub", "transformers", "transformers_compiled", "timm")


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Compare images per second with other libraries on this machine."""

    cases: tuple[Cases, ...] = _ALL
    """Cases to measure."""
    models: tuple[_ViT, ...] = ("ViT-B_16",)
    """Vision Transformers for inference and training."""
    batches: tuple[Count, ...] = (1, 8)
    """Images per call, for inference."""
    rounds: Count = 9
    """Timed calls of each peer, in turn."""
    threads: Count = 2
    """Threads of each peer."""
    output: pathlib.Path = pathlib.Path("benchmark-results")
    """Directory for results.json and results.md."""


def comparisons(arguments: Arguments) -> list[tuple[Case, tuple[str, ...]]]:
    """Return each requested case with its peers; the first peer is this project."""
    threads, found = arguments.threads, []
    for name in arguments.cases:
        if name == "phone":
            found.append((Case("inference", "ViT-Ti_16", 1, threads=1), (*_ARTIFACTS[:1], *_TFLITE)))
            continue
        models, batches, others = arguments.models, arguments.batches, _OTHERS
        if name == "families":
            models, batches, others = ("BiT-R50x1", "R50+ViT-B_16"), (8,), ("timm",)
        elif "training" in name:
            batches = (16,)
        artifacts = {"bfloat16": _ARTIFACTS[:1], "training": (), "training-bfloat16": ()}.get(name, _ARTIFACTS)
        task = "training" if "training" in name else "inference"
        precision = "bfloat16" if "bfloat16" in name else "float32"
        for model, batch in itertools.product(models, batches):
            case = Case(task, model, batch, precision=precision, threads=threads)
            found.append((case, (REFERENCE, *artifacts, *others)))
    return found


def table(case: Case, results: Sequence[Result]) -> list[str]:
    """Return a Markdown table: one row per peer, compared with this project and with the limit of the machine."""
    done = {result.peer: result for result in results if result.failure is None}
    own = next(result for result in results if result.peer != LIMIT)
    lines = [f"## {case.title}", "", f"{flops(case) / 1e9:,.1f} GFLOP a call.", ""]
    lines += [
        "| | ms, median (least to most) | images/s | relative | GFLOP/s | of the limit | prepare, s | first, s | MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if result.failure is not None:
            lines.append(f"| {result.peer} | failed: {result.failure.replace('|', '/')} | | | | | | | |")
            continue
        speed, spread = rate(result, case), f"{1e3 * min(result.seconds):.1f} to {1e3 * max(result.seconds):.1f}"
        limit = f"{speed / rate(done[LIMIT], case):.0%}" if LIMIT in done else ""
        images = "" if result.peer == LIMIT else f"{case.batch / result.median:.2f}"
        relative = f"{result.median / own.median:.2f}x" if own.failure is None and result.peer != LIMIT else ""
        lines.append(
            f"| {result.peer} | {1e3 * result.median:.1f} ({spread}) | {images} | {relative} | {speed / 1e9:.0f} "
            f"| {limit} | {result.prepare:.1f} | {result.first_call:.2f} | {result.peak_bytes / 1e6:.0f} |"
        )
    return [*lines, ""]


def main(arguments: Sequence[str]) -> None:
    """`--cases … --output DIR`"""
    parsed = parser.parse(Arguments, arguments, prog="python -m benchmarks", about=__doc__)
    cli.require_tensorflow()
    output = output_folder(parsed.output)
    head = f"{processor()}, {parsed.threads} threads, {time.strftime('%Y-%m-%d')}, {parsed.rounds} rounds"
    lines, cases = ["# Speed beside the peers", "", head, ""], []
    for case, peers in comparisons(parsed):
        print(f"{case.title} …", flush=True)
        results = compare(case, [*peers, LIMIT], parsed.rounds)
        shown = table(case, results)
        print("\n".join(shown), flush=True)
        lines += shown
        cases.append({**dataclasses.asdict(case), "results": [dataclasses.asdict(result) for result in results]})
        # After every case, so that an interrupted run keeps its results.
        write_results(output, {"machine": head, "cases": cases}, lines)


if __name__ == "__main__":
    cli.run(main)
