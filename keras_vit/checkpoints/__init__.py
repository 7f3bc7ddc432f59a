"""Checkpoints of every layout, in and out of models. Start reading at `load.py`."""
