"""Benchmarks, one file per op and per model; installed as ``deepfast.bench``."""
