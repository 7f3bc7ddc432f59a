"""Models: configurations, layers and builders. Start with `config.py`, then read `build.py` and `vit.py`."""
