"""What a trace of torch.profiler calls our ops."""

import re

import torch
from torch.profiler import ProfilerActivity, profile

from deepfast import nn, ops


def names(run):
    """The names in a trace of ``run`` that are not torch's."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    found = {event.name.split(": ")[-1] for event in profiled.events()}
    return {name for name in found if not re.match(r"aten::|torch::|\w+Backward0$|detach$", name)}


def test_each_node_of_a_stack_is_named():
    encoder = nn.TransformerEncoder(2, 16, 2, 32)
    x, mask = torch.randn(2, 5, 16, requires_grad=True), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    found = names(lambda: encoder(x, mask).sum().backward())
    assert all(name.startswith("deepfast::") for name in found), found
    nodes = (
        "attention",
        "boundary",
        "boundary_parameters",
        "feed_forward",
        "masked_weight",
        "pack",
    )
    for node in (*nodes, "unpack"):
        assert {f"deepfast::{node}", f"deepfast::{node}Backward"} <= found, node


def test_each_node_of_attention_residuals_is_named():
    x = torch.randn(3, 8, requires_grad=True)

    def run():
        connection, history = nn.AttentionResiduals(2, 8), nn.DepthHistory()
        y = connection(x, history)
        for _ in range(2):
            y = connection(y, history)
        y.sum().backward()

    found = names(run)
    assert not [name for name in found if name.startswith("_")], found
    for node in ("scaled_query", "boundary"):
        assert {f"deepfast::{node}", f"deepfast::{node}Backward"} <= found, node


def test_an_op_carries_its_own_name():
    x = torch.randn(4, 6, requires_grad=True)
    found = names(lambda: ops.layer_norm(x, None, None).sum().backward())
    assert {"deepfast::layer_norm", "deepfast::layer_normBackward"} <= found
