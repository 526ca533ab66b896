"""Counting bytes: what a training step keeps alive."""
