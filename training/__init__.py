"""Data, recipes, model.fit and evaluation. Start reading at `pretrain.py`."""

import os
import signal
import sys

if sys.argv[:1] == [
    "-m"
]:  # one of our commands is being loaded, for seconds in which `cli.run` cannot speak for it yet
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if (os.environ.get("KERAS_BACKEND") or "tensorflow") != "tensorflow":
        print(f"Training needs KERAS_BACKEND=tensorflow, but it is {os.environ['KERAS_BACKEND']}.", file=sys.stderr)
        sys.exit(2)

import keras_vit  # noqa: F401  (before tensorflow, whose remarks on loading it keeps from the terminal)
