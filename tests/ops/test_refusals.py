"""Arguments that all ops refuse alike, with one sentence that begins with the op's name."""

import pytest
import torch

from deepfast import ops

X, ROW = torch.randn(3, 4), torch.randn(4)
CU = torch.tensor([0, 3], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 3, "max_seqlen_k": 3}
CALLS = {
    "layer_norm": lambda x, **given: ops.layer_norm(x, ROW, ROW, **given),
    "rms_norm": lambda x, **given: ops.rms_norm(x, ROW, **given),
    "activation": lambda x, **given: ops.activation(x, "gelu", **given),
    "norm_linear": lambda x, **given: ops.norm_linear(x, ROW, ROW, X, **given),
    "feed_forward": lambda x, **given: ops.feed_forward(x, ROW, ROW, X, None, X.T, None, **given),
    "linear_cross_entropy": lambda x, **given: ops.linear_cross_entropy(
        x, X, torch.arange(3), **given
    ),
    "depth_mix": lambda x, **given: ops.depth_mix([x, X], torch.ones(2), **given),
    "depth_attention": lambda x, **given: ops.depth_attention([x, X], ROW, **given),
    "attention_residual": lambda x, **given: ops.attention_residual(ROW, [x, X], **given),
    "attention": lambda x, **given: ops.attention(x, *torch.randn(2, 3, 2, 2), **LENGTHS, **given),
    "peephole_lstm": lambda x, **given: ops.peephole_lstm(
        x, torch.randn(1, 4), torch.randn(3, 1), **given
    ),
}
SHAPES = {"attention": (3, 2, 2), "peephole_lstm": (3, 1, 4)}
FLAGS = {
    "layer_norm": ["training"], "rms_norm": ["training"], "activation": ["training"],
    "norm_linear": ["training", "rms"], "attention": ["causal"], "peephole_lstm": ["reverse"],
    "feed_forward": ["training", "rms", "keep", "want_norm"], "depth_attention": ["return_lse"],
    "attention_residual": ["return_weights"], "linear_cross_entropy": ["return_nll"],
}  # fmt: skip


def operand(name):
    return torch.randn(SHAPES.get(name, X.shape))


@pytest.mark.parametrize("wrong", ["False", 1, None, torch.zeros(2)])
@pytest.mark.parametrize(("name", "flag"), [(name, f) for name in FLAGS for f in FLAGS[name]])
def test_a_flag_is_a_bool(name, flag, wrong):
    CALLS[name](operand(name), **{flag: True})
    with pytest.raises(ValueError, match=f"^{name}: {flag} must be True or False, got "):
        CALLS[name](operand(name), **{flag: wrong})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_is_dense(name):
    with pytest.raises(TypeError, match=rf"^{name}: .* must be a dense tensor, got a torch.sparse"):
        CALLS[name](operand(name).to_sparse())
    with pytest.raises(TypeError, match=f"^{name}: .* must be a dense tensor, got a nested one"):
        CALLS[name](torch.nested.nested_tensor([X, X[:2]]))


@pytest.mark.parametrize("name", ["depth_mix", "depth_attention"])
def test_sources_are_no_scalar(name):
    with pytest.raises(TypeError, match=f"^{name}: sources must be a list of tensors, got Tensor"):
        getattr(ops, name)(torch.tensor(1.0), ROW)
