"""The papers' experiments: grids of ordinary runs."""
