"""Measurements: how fast, against what, how far from the hardware's limit. See bench/README.md."""
