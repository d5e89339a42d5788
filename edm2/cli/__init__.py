"""Commands of `python -m edm2`; one file per group."""
