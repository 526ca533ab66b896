"""What a trace of torch.profiler calls our ops."""

import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from deepfast import nn, ops


def names(run):
    """The names in a trace of ``run`` that are not torch's."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run()
    found = {event.name.split(": ")[-1] for event in profiled.events()}
    return {name for name in found if not re.match(r"aten::|torch::|\w+Backward0$|detach$", name)}


def of_a_stack():
    encoder = nn.TransformerEncoder(2, 16, 2, 32)
    x, mask = torch.randn(2, 5, 16, requires_grad=True), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    encoder(x, mask).sum().backward()


def of_attention_residuals():
    connection, history = nn.AttentionResiduals(2, 8), nn.DepthHistory()
    y = connection(torch.randn(3, 8, requires_grad=True), history)
    for _ in range(2):
        y = connection(y, history)
    y.sum().backward()


def of_an_op():
    ops.layer_norm(torch.randn(4, 6, requires_grad=True), None, None).sum().backward()


NODES = {
    of_a_stack: "attention boundary boundary_parameters feed_forward pack unpack",
    of_attention_residuals: "boundary boundary_parameters",
    of_an_op: "layer_norm",
}


@pytest.mark.parametrize(("run", "nodes"), NODES.items())
def test_each_node_is_named(run, nodes):
    found = names(run)
    assert not [name for name in found if name.startswith("_")], found
    if run is of_a_stack:
        assert all(name.startswith("deepfast::") for name in found), found
    for node in nodes.split():
        assert {f"deepfast::{node}", f"deepfast::{node}Backward"} <= found, node
