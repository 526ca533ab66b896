"""Mistakes with a DepthHistory raise an error and do not change it."""

import pytest
import torch

from deepfast.backend import BackendError
from deepfast.nn import DLCL, AttentionResiduals, DepthHistory, LayerNorm
from tests.depth.stack import DIM, TOKENS, Stack, history, leaf


def test_a_history_used_by_two_stacks(backend):
    a, b, h = Stack(backend=backend), Stack(backend=backend), history()
    x = a.dlcl(leaf(), h)
    with pytest.raises(RuntimeError, match="belongs to another stack"):
        b.dlcl(x, h)


def test_a_history_used_on_two_devices(backend):
    a, h = Stack(backend=backend), history()
    a.dlcl(leaf(), h)
    with pytest.raises(ValueError, match="the input must be on cpu, got meta"):
        a.dlcl(torch.randn(TOKENS, DIM, device="meta"), h)


def test_a_history_used_for_two_passes(backend):
    stack, h = Stack(backend=backend), history()
    out = stack(leaf(), h)
    with pytest.raises(RuntimeError, match=r"9 layers push 10 states.*new DepthHistory"):
        stack.dlcl(out, h)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="new"):
        stack.dlcl(leaf(), h)


@pytest.mark.parametrize("index", [2, 5, -1])
def test_a_layer_called_out_of_order(backend, index):
    stack, h = Stack(backend=backend), history()
    x = stack.dlcl(leaf(), h)
    with pytest.raises(RuntimeError, match="out of order: expected index 1, got"):
        stack.dlcl(x, h, index=index)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.randn(TOKENS + 1, DIM), "expected 5 tokens .*got 6"),
        (torch.randn(TOKENS, DIM).double(), "torch.float32 .*got 5 of torch.float64"),
        (torch.randn(TOKENS, DIM + 1), r"must be \(..., 12\), got \(5, 13\)"),
    ],
)
def test_states_of_one_pass_are_alike(backend, y, message):
    stack, h = Stack(backend=backend), history()
    stack.dlcl(leaf(), h)
    with pytest.raises(ValueError, match=message):
        stack.dlcl(y, h)
    assert len(h) == 1, "a refused push changed the history"


@pytest.mark.parametrize("kind", [DLCL, AttentionResiduals])
def test_states_are_numbers_with_a_fraction(kind):
    message = f"{kind.__name__}: the input must have a floating-point dtype, got torch.int64"
    with pytest.raises(ValueError, match=message):
        kind(2, DIM)(torch.ones(3, DIM, dtype=torch.int64), DepthHistory())


def test_an_empty_history_is_true():
    given = DepthHistory(inplace=False)
    assert (given or DepthHistory()) is given


def test_an_unknown_backend():
    with pytest.raises(BackendError, match=r"expected one of cuda, triton, .*, sdpa, ref"):
        DLCL(2, DIM, backend="gpu")(leaf(), history())


@pytest.mark.parametrize("block", [0, 1.5, "a"])
def test_block_of_no_rows(block):
    with pytest.raises(
        ValueError, match=f"block must be a whole number of at least 1, got {block!r}"
    ):
        DepthHistory(block=block)


def test_an_index_that_is_no_number():
    with pytest.raises(TypeError, match="DLCL: index must be a whole number, got 'a'"):
        DLCL(2, DIM)(leaf(), history(), index="a")


def test_a_refused_first_push_leaves_the_history_fresh(backend):
    """A history whose first push failed can be used again."""
    stack, h = Stack(backend=backend), history()
    with pytest.raises(ValueError, match="the input must be"):
        stack.dlcl(torch.randn(3, DIM + 1), h)
    stack(leaf(), h).sum().backward()


@pytest.mark.parametrize("out_norm", [torch.nn.LayerNorm(DIM), (1, 2)])
def test_refuses_an_output_norm_of_another_kind(out_norm):
    with pytest.raises(TypeError, match="out_norm must be an OutNorm"):
        DLCL(2, DIM)(leaf(), history(), out_norm=out_norm)


@pytest.mark.parametrize("eps", [-1.0, float("nan"), "1e-5"])
def test_refuses_an_output_norm_with_another_eps(eps):
    norm = LayerNorm(DIM).as_output()._replace(eps=eps)
    with pytest.raises(ValueError, match=r"out_norm\.eps must be a number of at least 0, got"):
        DLCL(2, DIM)(leaf(), history(), out_norm=norm)


def test_a_change_of_grad_mode_within_a_pass_is_an_error(backend):
    """A push without gradients would cut its state and all states below out of the graph."""
    stack, y = Stack(backend=backend), leaf()
    for inside in (0, 2):
        h = history()

        def push_all(h=h, inside=inside):
            for k in range(4):
                with torch.set_grad_enabled(k != inside):
                    stack.dlcl(torch.tanh(y), h)

        with pytest.raises(RuntimeError, match="grad mode changed"):
            push_all()
