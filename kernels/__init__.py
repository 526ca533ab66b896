"""Triton device code and launchers, one file per op; installed as ``deepfast.kernels``.

No op has a Triton kernel yet: ``deepfast info`` says so for each of them.
"""
