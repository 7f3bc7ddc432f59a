"""Exact metrics of any classifier, and their report."""
