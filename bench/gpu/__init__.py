"""Tests and benchmarks that need a GPU: `python -m bench.gpu`."""
