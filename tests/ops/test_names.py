"""Traces of torch.profiler show our ops by their names."""

import re

import torch
from torch.profiler import ProfilerActivity, profile

from deepfast import nn, ops

NODES = "attention boundary boundary_parameters feed_forward pack unpack layer_norm"


def test_each_node_is_named():
    encoder = nn.TransformerEncoder(2, 16, 2, 32)
    x, mask = torch.randn(2, 5, 16, requires_grad=True), torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    connection, history = nn.AttentionResiduals(2, 8), nn.DepthHistory()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        encoder(x, mask).sum().backward()
        y = torch.randn(3, 8, requires_grad=True)
        for _ in range(3):
            y = connection(y, history)
        ops.layer_norm(y, None, None).sum().backward()
    found = {event.name.split(": ")[-1] for event in profiled.events()}
    torchs = r"aten::|torch::|\w+Backward0$|detach$"
    found = {name for name in found if not re.match(torchs, name)}
    assert all(name.startswith("deepfast::") for name in found), found
    for node in NODES.split():
        assert {f"deepfast::{node}", f"deepfast::{node}Backward"} <= found, node
