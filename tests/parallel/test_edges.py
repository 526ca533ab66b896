"""What crosses the edges: counted, and counted again in a run."""

import pytest
import torch

from deepfast.nn import DLCL, AttentionResiduals
from deepfast.parallel import edge_payload, split
from tests.parallel.encoders import CONNECTIONS, DIM, batch, encoder, run


def test_96_layers_in_8_stages():
    found = edge_payload(DLCL(96, 8), 8)
    assert found.tensors == (13, 25, 37, 49, 37, 25, 13)
    assert found.all_states == (13, 25, 37, 49, 61, 73, 85)
    # A plain pipeline sends one tensor over each edge. Beside it, the connection sends:
    extra, every = found.total - 7, sum(found.all_states) - 7
    assert (extra, every) == (192, 336)
    assert extra <= 0.58 * every
    assert found.peak - 1 == 96 // 2
    assert round(found.total / sum(found.all_states), 2) == 0.58


@pytest.mark.only_if(lambda layers, stages: stages <= layers)
@pytest.mark.parametrize("layers", range(2, 12))
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_never_more_than_half(layers, stages):
    assert edge_payload(DLCL(layers, 8), stages).peak <= layers // 2 + 1


def test_patterns_send_fewer():
    assert edge_payload(DLCL(48, 8, window=4), 4).tensors == (4, 4, 4)
    # A row of six reads older states.
    assert edge_payload(DLCL(48, 8, period=6), 4).tensors == (7, 5, 3)
    assert edge_payload(AttentionResiduals(48, 8, reads=2, block=6), 4).tensors == (3, 5, 7)
    assert edge_payload(AttentionResiduals(48, 8), 4).tensors == (13, 25, 13)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("name", CONNECTIONS)
def test_what_crosses_is_what_is_counted(name, stages):
    model = encoder(7, **CONNECTIONS[name])
    counted = edge_payload(model.connection.depth, stages).tensors
    x, _, padding = batch()
    _, crossed = run(split(model, stages), x, padding)
    state = x.numel()
    measured = [sum(t.numel() for t in payload if t.shape[-1] == DIM) for payload in crossed]
    assert measured == [count * state for count in counted]
    softmax = CONNECTIONS[name].get("connection", "").endswith("attnres")
    for payload, count in zip(crossed, counted, strict=True):
        assert all(t.is_contiguous() for t in payload)
        beside = [t.numel() for t in payload if t.shape[-1] != DIM]
        sums = len(payload) > 1 and payload[1].dim() == 4
        assert beside == ([(count - 1) * state // DIM] if softmax and sums else [])


def test_gradients_of_sums_are_those_of_the_rows():
    """What comes back for P_l is g_l, the gradient of x_{l+1}: for the last row of a stack without
    a norm behind it, the gradient of the output."""
    first, second = split(encoder(4, norm="post", dlcl={"norm": None}), 2)
    x, _, _ = batch()
    payload = tuple(t.detach().requires_grad_() for t in first(x))
    out = second(*payload)
    g = torch.randn_like(out)
    out.backward(g)
    torch.testing.assert_close(payload[1].grad[-1], g, rtol=0, atol=0)


def test_the_text():
    assert str(edge_payload(DLCL(5, 8), 3)).splitlines() == [
        "edge 0: 3 states (all states: 3)",
        "edge 1: 2 sums (all states: 5)",
        "in all 5 of 8, at most 3 of 5",
    ]
    assert str(edge_payload(DLCL(5, 8), 1)) == "in all 0 of 0, at most 0 of 0"
