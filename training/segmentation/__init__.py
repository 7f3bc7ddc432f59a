"""Semantic segmentation by a linear head on the frozen features of a Vision Transformer."""
