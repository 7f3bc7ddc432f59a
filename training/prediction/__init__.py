"""Classify image files: the table, the files of results, and the page in a browser."""
