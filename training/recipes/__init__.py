"""What a training run is, and the named ones. Start reading at `recipe.py`."""
