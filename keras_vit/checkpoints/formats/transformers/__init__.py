"""The formats of transformers, one module for each family of models with keys of its own."""
