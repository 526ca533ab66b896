"""Gradients of each layer at initialisation: the numbers, the picture and the page."""

import pytest
import torch
import torch.nn.functional as F

from bench import gradients
from deepfast.nn import TransformerEncoder


@pytest.fixture(autouse=True)
def _one_thread(threads):
    with threads(1):
        yield


@pytest.mark.parametrize("name", gradients.STACKS)
def test_the_norm_of_each_layer_s_gradient(name):
    encoder = TransformerEncoder(3, 8, 2, 12, dropout=0.0, **gradients.STACKS[name])
    x, labels = torch.randn(2, 5, 8), torch.randint(gradients.LABELS, (10,))
    got = gradients.layer_gradients(encoder, x, labels)
    output = torch.randn(gradients.LABELS, 8, generator=torch.Generator().manual_seed(0)) * 8**-0.5
    if encoder.latent is not None:
        # The same draw again.
        encoder.latent.set_step(0)
    loss = F.cross_entropy(F.linear(encoder(x).flatten(0, 1), output), labels)
    for layer, norm in zip(encoder.layers, got, strict=True):
        grads = torch.autograd.grad(loss, list(layer.parameters()), retain_graph=name[0] != "D")
        want = torch.cat([g.flatten() for g in grads]).norm()
        torch.testing.assert_close(norm, want, rtol=1e-4, atol=1e-6)
        if name[0] == "D":
            # A history serves one backward.
            loss = F.cross_entropy(F.linear(encoder(x).flatten(0, 1), output), labels)


def test_a_run_again_is_the_same_and_a_stack_more_is_a_line_more():
    stacks = {"window": {"norm": "pre", "dlcl": {"window": 2}}}
    first, second = (gradients.measure(stacks, layers=4, seeds=2) for _ in range(2))
    assert first == second
    assert len(first["window"]) == 4
    assert min(first["window"]) > 0


def test_page_and_picture(tmp_path):
    norms = {name: [2.0 / (k + 1) for k in range(10)] for name in gradients.STACKS}
    page = gradients.table(norms)
    assert "| 5 | 0.4 | 0.4 | 0.4 | 0.4 |" in page
    assert "| lowest over highest | 10 | 10 | 10 | 10 |" in page
    assert "| the same, per layer | 1.292 |" in page
    assert "| 25 |" not in page
    for name in ("a.svg", "b.svg"):
        gradients.draw(norms, tmp_path / name)
    svg = (tmp_path / "a.svg").read_text()
    assert svg == (tmp_path / "b.svg").read_text()
    assert all(name in svg for name in gradients.STACKS)
