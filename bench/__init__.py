"""Benchmarks, one file for each op and each model; run from a clone, never installed."""
