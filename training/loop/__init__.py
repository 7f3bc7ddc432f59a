"""One training run. Read `train.py`, then `setup.py`, `build.py` and `trainer.py`."""
