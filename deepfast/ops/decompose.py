"""Decomposition of exported programs: our ops become torch's, for ONNX and other runtimes.

By default torch decomposes only CompositeImplicitAutograd ops of a library: those without kernels
and without autograd of their own. Ours have both. So a rule for torch's tracing mode decomposes
them, and does so in no other trace: compilers keep the ops, and eager code never meets the rule.
"""

import sys
from collections.abc import Callable

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode


def _decomposing(mode: ProxyTorchDispatchMode) -> bool:
    """Whether ``mode`` traces for `ExportedProgram.run_decompositions` with torch's own table.

    With an empty table, or one for a few ops, a program keeps our ops. AOTInductor also exports
    with torch's table, but it calls our kernels.
    """
    if not torch.compiler.is_exporting():
        return False
    # Older versions of torch have the table in a global variable.
    table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", None)
    table = mode.decomposition_table if table is None else table
    inductor = sys.modules.get("torch._inductor.virtualized")
    # Reversed subtraction is no core op: every table that decomposes all of torch has it.
    return torch.ops.aten.rsub.Tensor in table and not (inductor and inductor.V.aot_compilation)


def register_decomposition(
    op: torch._ops.OpOverload, operands: type, plain: Callable, fake: Callable, lib
) -> None:
    """Makes ``op`` decompose into ``plain``, see `deepfast.ops.register.register`."""

    def rule(mode, func, types, args, kwargs):
        if not _decomposing(mode):
            return mode.__torch_dispatch__(func, types, args, kwargs)
        with mode:
            given = operands(*args, **kwargs)
            results = plain(given)
            if len(op._schema.returns) == 1:
                return results
            # What only backward reads is NaN here.
            rest = fake(given)[len(results) :]
            return *results, *(torch.full_like(x, torch.nan) for x in rest)

    torch.library.register_torch_dispatch(op._schema.name, ProxyTorchDispatchMode, rule, lib=lib)
