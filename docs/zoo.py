"""Renew the milliseconds of the zoo page: one image on two cores of this machine, in float32.

    python -m docs.zoo

times the compiled forward pass of each model up to 100 GMACs alone, and writes docs/zoo.json. It takes eight minutes.
"""

import json
import pathlib
import time

from benchmarks.case import Case, processor
from benchmarks.comparison import REFERENCE, compare
from keras_vit.published import find_models

FILE = pathlib.Path(__file__).with_suffix(".json")
LARGEST, ROUNDS = 100.0, 5


def main() -> None:
    milliseconds = {}
    for model in find_models(pretrained=True):
        if model.gmacs <= LARGEST:
            (result,) = compare(Case("inference", model.name, 1, model.pixels), [REFERENCE], ROUNDS)
            milliseconds[model.name] = round(1000.0 * result.median, 1)
            print(model.name, milliseconds[model.name], flush=True)
    facts = {"processor": processor(), "cores": 2, "date": time.strftime("%Y-%m-%d"), "milliseconds": milliseconds}
    FILE.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
