"""Every op of `deepfast bench`, forward and backward, beside torch's: `pytest bench/ops.py`."""

from functools import partial

import pytest
import torch

from deepfast.cases.case import torch_dropout
from deepfast.measure.bench_ops import CASES, Sizes, pass_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("who", ["deepfast", "torch"])
def test_op(benchmark, op, dtype, who):
    case = CASES[op](Sizes(tokens=2048, dtype=dtype))
    form = case.run if who == "deepfast" else partial(case.plain, torch_dropout)
    benchmark.pedantic(pass_of(form, case.of_one_dtype(dtype), True), rounds=9, warmup_rounds=1)
    nbytes = sum(moved.nbytes(dtype) for moved in case.moved)
    if nbytes and benchmark.enabled:
        gb_per_second = round(nbytes / benchmark.stats.stats.median / 1e9, 2)
        benchmark.extra_info.update(bytes=nbytes, gb_per_second=gb_per_second)
