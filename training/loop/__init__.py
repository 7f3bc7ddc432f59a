"""One run, from its options to the trained weights. Start reading at `setup.py`, then `fit.py`."""
