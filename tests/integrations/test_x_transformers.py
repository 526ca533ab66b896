"""The layer integrators of x-transformers, and fla's naive attention residuals."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepfast import ops
from deepfast.integrations import fuse_layer_integrators


def grads(out, leaves):
    return torch.autograd.grad(out.sin().sum(), leaves)


@pytest.fixture
def package():
    return pytest.importorskip("x_transformers.x_transformers")


@pytest.mark.parametrize("views", [1, 3])
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_is_the_formula(package, views, softmax, stacked):
    lime = package.DynamicLIMe(16, 5, num_views=views, use_softmax=softmax).double()
    handle = fuse_layer_integrators(lime)
    hiddens = torch.randn(5, 2, 7, 16, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    leaves = [x, hiddens, *lime.parameters()]
    out = lime(x, hiddens if stacked else list(hiddens))
    got = [out, *grads(out, leaves)]

    norm, linear = lime.to_weights[0], lime.to_weights[1]
    scores = linear(F.normalize(x, dim=-1) * 4 * norm.g).unflatten(-1, (views, 5))
    weights = scores.softmax(-1) if softmax else scores.relu()
    out = torch.stack([sum(weights[:, :, v, k, None] * hiddens[k] for k in range(5))
                       for v in range(views)])  # fmt: skip
    out = out[0] if views == 1 else out
    torch.testing.assert_close(got, [out, *grads(out, leaves)])

    handle.remove()
    assert type(lime) is package.DynamicLIMe
    out = lime(x, list(hiddens))
    torch.testing.assert_close(got, [out, *grads(out, leaves)])


def test_a_whole_model(package):
    model = package.TransformerWrapper(
        num_tokens=20, max_seq_len=12,
        attn_layers=package.Decoder(dim=32, depth=3, heads=2, integrate_layers=True),
    )  # fmt: skip
    fused = copy.deepcopy(model)
    fuse_layer_integrators(fused)
    assert fused.state_dict().keys() == model.state_dict().keys()
    tokens = torch.randint(0, 20, (2, 12))
    found = []
    for m in (model, fused, pickle.loads(pickle.dumps(fused))):
        out = m(tokens)
        out.logsumexp(-1).sum().backward()
        found.append([out, *(p.grad for p in m.parameters() if p.grad is not None)])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_refuses():
    with pytest.raises(ValueError, match="Linear has no DynamicLIMe of x_transformers"):
        fuse_layer_integrators(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="model must be a module, got NoneType"):
        fuse_layer_integrators(None)


@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("output_norm", [False, True])
def test_attention_residual_is_that_of_fla(count, output_norm):
    naive = pytest.importorskip("fla.ops.attnres.naive").naive_attnres
    residuals = [torch.randn(2, 5, 16, requires_grad=True) for _ in range(count)]
    query, weight, last = (torch.randn(16, requires_grad=True) for _ in range(3))
    output = {"output_rms_weight": last} if output_norm else {}
    found = []
    for op in (ops.attention_residual, naive):
        out, p = op(query, residuals, weight, scale=0.5, return_weights=True, **output)
        p = p if op is naive else p.movedim(-1, 0)
        leaves = [query, weight, *residuals, *output.values()]
        found.append([out, p.detach(), *grads(out, leaves)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
