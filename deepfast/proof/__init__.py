"""Finds out on the user's own GPU which kernels are right, and which of those are faster.

`table` keeps what is known, `prove` starts the `worker` processes, and `deepfast.cases` says what
they run.
"""
