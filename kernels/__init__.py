"""Triton device code and launchers, one file per op; installed as ``deepfast.kernels``.

``deepfast info`` says for each op whether they serve, and why not.
"""
