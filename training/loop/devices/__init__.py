"""Devices: distribution strategies, CPU kernels, rematerialization, several workers on one machine."""
