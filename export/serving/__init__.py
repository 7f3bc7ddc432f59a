"""What stands around a served model: the server's configuration (`kit.py`) and a client (`client/`)."""
