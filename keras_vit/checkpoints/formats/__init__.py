"""The formats of checkpoint files, one module for each; `keras_vit/checkpoints/layouts.py:FORMATS` lists them."""
