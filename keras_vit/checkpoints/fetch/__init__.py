"""Checkpoints by path, address or official name: found, downloaded once, and kept in a cache."""
