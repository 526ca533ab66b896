"""The dtypes of the package: which there are, and in which one arithmetic is done."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Those that the ops take."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic: fp64 for fp64, fp32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """As "bfloat16"."""
    return str(dtype).removeprefix("torch.")
