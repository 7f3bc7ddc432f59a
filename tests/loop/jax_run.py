"""A run on JAX in a process of its own, on one host or as one of two.

python -m tests.loop.jax_run WORKDIR HOST SIGNAL STEP [OPTIONS ...] [, OPTIONS OF THE SECOND HOST ...]

It has dropout, an average, and several checkpoints between evaluations. The host sends itself the signal when the
checkpoint of the step is saved; 0 for none.
"""

import json
import os
import sys

from training import pretrain
from training.loop.train import Training

if __name__ == "__main__":
    workdir, host, number, step, *more = sys.argv[1:]
    index = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    save = Training._save

    def save_and_signal(self, seconds):
        save(self, seconds)
        if int(host) == index and int(step) == self.step:
            os.kill(os.getpid(), int(number))

    Training._save = save_and_signal  # type: ignore[method-assign]
    shared, own = more, []
    if "," in more:
        shared, own = more[: more.index(",")], more[more.index(",") + 1 :]
    command = "digits --data digits --seed 5 --epochs 1 --batch-size 96 --warmup-steps 4 --checkpoint-every 2"
    command += " --evaluate-every 4 --ema-decay 0.9 --model.num-layers 1 --model.hidden-size 24 --model.mlp-dim 48"
    pretrain.main([*command.split(), *shared, *(own if index else []), "--workdir", workdir])
