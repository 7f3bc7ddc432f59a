"""Frozen features on disk, and what is found by them: neighbors, wrong labels, copies, odd images."""
