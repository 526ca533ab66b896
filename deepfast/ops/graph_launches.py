"""Launches of Triton kernels and of the reference as ops, for graphs that hold a depth connection.

These launchers are Python, which a compiler cannot trace. The op of a launch calls the launcher
when it runs. Launches of deepfast._C are ops already.
"""

import functools
from types import SimpleNamespace

import torch

from deepfast import backend
from deepfast.launches import LAUNCHES
from deepfast.ops.register import LIBRARY, register_launch


@functools.cache
def graph_launches(op: str, requested: str | None) -> SimpleNamespace:
    """The launches of ``op``, which take their operands by name. requested: as in
    `deepfast.backend.choose`, which each asks when it runs."""

    def one(name: str):
        run = _op(name)
        return LAUNCHES[name].by_name(lambda operands: run(*operands, requested))

    return SimpleNamespace(**{name: one(name) for name in backend.OPS[op]})


@functools.cache
def _op(name: str):
    launch, in_graph = LAUNCHES[name], f"{name}_in_graph"

    def run(*given) -> None:
        operands, requested = launch.record(*given[:-1]), given[-1]
        states = operands.states  # type: ignore[attr-defined]
        width = states.shape[-1]
        _, chosen = backend.choose(launch.op, requested, states.device, states.dtype, width)
        getattr(chosen, name).run(operands)

    schema = launch.schema.replace(name, in_graph, 1).replace(") ->", ", str? backend) ->")
    LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(in_graph, run, "CompositeExplicitAutograd")
    register_launch(in_graph, launch)
    return getattr(torch.ops.deepfast, in_graph).default
