"""Checkpoints with attention residuals under others' names, against the formula in float64."""

import copy
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

import deepfast
from tests.attach.layers import NAMES, TwoParts, literal
from tests.attach.models import D, Loop, X, perturbed

L = 5
READS = {
    "fla": ("attn_res", "mlp_res", "res"),
    "k3": ("self_attention_res", "mlp_res", "output_attn_res"),
}
FULL = {"attnres_block_size": 1, "norm_eps": 1e-6}


def plain():
    torch.manual_seed(0)
    parts = OrderedDict(model=Loop(layers=L, layer=TwoParts), head=nn.Linear(D, 3))
    return perturbed(nn.Sequential(parts)).double()


def connected(config, **more):
    model = plain()
    options = {"sublayers": NAMES} | deepfast.attnres_options(config) | more
    deepfast.connect(model.model, norm="pre", **options).double()
    return model


def checkpoint(kind):
    """A whole model's state in the names of others, with the queries and gains of its reads."""
    *sublayers, last = READS[kind]
    names = [f"model.blocks.{i}.{name}" for i in range(L) for name in sublayers]
    state, queries, gains = plain().state_dict(), *torch.randn(2, 2 * L + 1, D).double()
    for name, query, gain in zip((*names, f"model.{last}"), queries, gains, strict=True):
        state |= {f"{name}_proj.weight": query[None], f"{name}_norm.weight": gain}
    return state, queries, gains


@pytest.mark.parametrize(("kind", "config", "size"), [
    ("fla", FULL, 1),
    ("fla", FULL | {"attnres_block_size": 2}, 2),
    # 5 layers: the last block is shorter.
    ("fla", FULL | {"attnres_block_size": 8}, 8),
    ("k3", {"attn_res_block_size": 2, "rms_norm_eps": 1e-6}, 4),
    ("k3", {"attn_res_block_size": 12, "rms_norm_eps": 1e-6}, 24),
])  # fmt: skip
def test_in_and_out(kind, config, size):
    """size: the sublayers in a block."""
    state, queries, gains = checkpoint(kind)
    model, literally, x = connected(types.SimpleNamespace(**config)), plain(), X.double()
    deepfast.load_attnres(model, copy.copy(state))
    # The gain of an RMSNorm in the scores scales the query.
    wanted = literally.head(literal(literally.model, x, queries * gains, size=size))
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)
    again = deepfast.attnres_state_dict(model, kind)
    torch.testing.assert_close(dict(again), dict(state), rtol=0, atol=0)


def load(model, **changes):
    """Loads a checkpoint with other entries; None removes one."""
    changed = {f"model.{name.replace('__', '.')}": value for name, value in changes.items()}
    state = checkpoint("fla")[0] | changed
    deepfast.load_attnres(model, {n: value for n, value in state.items() if value is not None})


@pytest.mark.parametrize(("call", "message"), [
    (lambda m: load(m, res_proj__weight=None), "the checkpoint has no model.res_proj.weight"),
    (lambda m: load(m, res_norm__weight=torch.ones(3)), r"weight must be \(32,\), got \(3,\)"),
    (lambda m: load(m, depth_connection__query=torch.ones(11, D)), "the reads under two names"),
    (lambda m: deepfast.load_attnres(m, plain().state_dict()),
     "expected the names of fla or k3, such as model.blocks.0.attn_res_proj.weight"),
    (lambda m: load(plain()), "expected a Sequential with one deepfast.connect, .* got 0"),
    (lambda m: load(connected(FULL, additive="one")), "'additive': False.* got .*'additive': True"),
    (lambda m: load(connected(FULL, sublayers=None)), "expected {'reads': 2.* got {'reads': 1"),
    (lambda m: deepfast.attnres_options({"hidden_size": 3}),
     "a config with either attnres_block_size or attn_res_block_size, .* got {}"),
    (lambda m: deepfast.attnres_options({"attnres_block_size": 4}),
     r"with norm_eps or rms_norm_eps, got .* and eps \[\]"),
    (lambda m: deepfast.attnres_options(FULL | {"attnres_block_size": 3}),
     "must be 1 or even, .* got 3"),
])  # fmt: skip
def test_refused_checkpoints_change_nothing(call, message):
    model = connected(FULL)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        call(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
