"""Where a model is trained, and in which form."""
