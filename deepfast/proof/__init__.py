"""What is known of a GPU's kernels: which are right there, and which of those are faster.

`table` keeps it, `known` serves it to `deepfast.backend`, and `prove` finds it out: it starts
programs that run kernels, which are `deepfast.cases.worker`, since all ops lie above this folder.
"""
