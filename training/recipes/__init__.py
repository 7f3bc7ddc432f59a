"""Recipes: all hyperparameters of a training run, and the named ones. Read `recipe.py` first."""
