"""One training run. Read `pretrain.py` or `finetune.py`, then `setup.py`, `train.py`, `trainer.py`, in this order."""
