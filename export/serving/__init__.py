"""TF Serving: the server configuration (`kit.py`) and a client (`client.py`)."""
