"""TF Serving: the server configuration (`kit.py`) and clients (`client/`)."""
