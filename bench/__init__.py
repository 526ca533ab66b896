"""Measured numbers; run from a clone, never installed."""
