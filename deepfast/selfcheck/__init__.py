"""Checks of a GPU's kernels against float64: of a kernel before its first use, and of all kernels.

`first_use` runs each variant of a kernel once on small random operands, which `operands` makes.
`full` is the work of `deepfast selfcheck`: all variants, sizes and times, in processes of their
own. `store` keeps the results on disk.
"""
