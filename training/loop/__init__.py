"""One training run. Read `pretrain.py` or `finetune.py`, then `setup.py`, `fit.py` and `trainer.py`, in this order."""
