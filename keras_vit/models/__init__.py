"""The models: their configs, layers and builders. Start reading at `config.py`, then `build.py` and `vit.py`."""
