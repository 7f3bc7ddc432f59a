"""Frozen features and what is fitted to them."""
