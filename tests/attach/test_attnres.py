"""Checkpoints with attention residuals under others' names, against the formula in float64."""

import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deepfast
from tests.attach.models import every

D, L, VOCAB, EPS = 16, 5, 11, 1e-5
READS = {
    "fla": ("attn_res", "mlp_res", "res"),
    "k3": ("self_attention_res", "mlp_res", "output_attn_res"),
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(D, EPS), nn.RMSNorm(D, EPS)
        self.attn, self.mlp = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(Layer() for _ in range(L))
        self.norm = nn.RMSNorm(D, EPS)

    def forward(self, ids):
        return self.norm(every(self.layers, self.embeddings(ids)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.lm_head = Stack(), nn.Linear(D, VOCAB, bias=False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def checkpoint(kind):
    """A whole model's state in the names of others, with the pair of layer 0 that is not used."""
    attention, mlp, last = READS[kind]
    names = [f"layers.{i}.{name}" for i in range(L) for name in (attention, mlp)]
    state = {n: p.detach().double() for n, p in Model().state_dict().items()}
    for name in (*names, last):
        state[f"model.{name}_proj.weight"] = torch.randn(1, D).double()
        state[f"model.{name}_norm.weight"] = torch.randn(D).double()
    return state


def formula(state, kind, ids, size):
    """The logits. size: sublayers in a block, 1 for the full form."""
    attention, mlp, last = READS[kind]

    def rms(x):
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()

    def read(name, sources):
        query, gain = state[f"model.{name}_proj.weight"][0], state[f"model.{name}_norm.weight"]
        weights = torch.stack([(rms(v) * gain) @ query for v in sources]).softmax(0)
        return sum(w.unsqueeze(-1) * v for w, v in zip(weights, sources, strict=True))

    done, block = [state["model.embeddings.weight"][ids]], []
    for i in range(L):
        for name, read_name, norm in ((f"layers.{i}.attn", attention, "attn_norm"),
                                      (f"layers.{i}.mlp", mlp, "mlp_norm")):  # fmt: skip
            sources = [*done, sum(block)] if block else done
            x = rms(read(f"layers.{i}.{read_name}", sources))
            x = x * state[f"model.layers.{i}.{norm}.weight"]
            block.append(F.linear(x, state[f"model.{name}.weight"], state[f"model.{name}.bias"]))
            if len(block) == size:
                done.append(sum(block))
                block = []
    x = rms(read(last, [*done, sum(block)] if block else done)) * state["model.norm.weight"]
    return x @ state["lm_head.weight"].T


def connected(config, **more):
    model = Model().double()
    options = {"sublayers": (("attn_norm", "attn"), ("mlp_norm", "mlp"))}
    options |= deepfast.attnres_options(config) | more
    deepfast.connect(model.model, "layers", norm="pre", dim=D, **options).double()
    return model


@pytest.mark.parametrize(("kind", "config", "size"), [
    ("fla", {"attnres_block_size": 1, "norm_eps": EPS}, 1),
    ("fla", {"attnres_block_size": 2, "norm_eps": EPS}, 2),
    # 5 layers: the last block is shorter.
    ("fla", {"attnres_block_size": 8, "norm_eps": EPS}, 8),
    ("k3", {"attn_res_block_size": 2, "rms_norm_eps": EPS}, 4),
    ("k3", {"attn_res_block_size": 12, "rms_norm_eps": EPS}, 24),
])  # fmt: skip
def test_in_and_out(kind, config, size):
    torch.manual_seed(0)
    state, model = checkpoint(kind), connected(types.SimpleNamespace(**config))
    deepfast.load_attnres(model, state)
    ids = torch.randint(VOCAB, (2, 7))
    torch.testing.assert_close(model(ids), formula(state, kind, ids, size), rtol=1e-10, atol=1e-10)
    again = deepfast.attnres_state_dict(model, kind)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def changed(**entries):
    """A checkpoint with other entries; None removes one."""
    state = checkpoint("fla") | {f"model.{n.replace('__', '.')}": v for n, v in entries.items()}
    return {name: value for name, value in state.items() if value is not None}


FULL = {"attnres_block_size": 1, "norm_eps": EPS}


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda m: deepfast.load_attnres(m, changed(res_proj__weight=None)), ValueError,
     "the checkpoint has no model.res_proj.weight"),
    (lambda m: deepfast.load_attnres(m, changed(res_norm__weight=torch.ones(3))), ValueError,
     r"model.res_norm.weight must be \(16,\), got \(3,\)"),
    (lambda m: deepfast.load_attnres(m, Model().state_dict()), ValueError,
     "expected the names of fla or k3, such as model.layers.0.attn_res_proj.weight"),
    (lambda m: deepfast.load_attnres(m, changed(norm__weight=None)), RuntimeError,
     "Missing key"),
    (lambda m: deepfast.load_attnres(Model(), checkpoint("fla")), ValueError,
     "expected a Model with one deepfast.connect, .* got 0"),
    (lambda m: deepfast.load_attnres("model", {}), TypeError,
     "model must be a module, got str"),
    (lambda m: deepfast.attnres_state_dict(m, "kimi"), ValueError, "names must be"),
    (lambda m: deepfast.attnres_options({"hidden_size": 3}), ValueError,
     "a config with either attnres_block_size or attn_res_block_size, .* got {}"),
    (lambda m: deepfast.attnres_options({"attnres_block_size": 4}), ValueError,
     r"with norm_eps or rms_norm_eps, got .* and eps \[\]"),
    (lambda m: deepfast.load_attnres(m, changed(layers__0__attn_res_proj__weight=None)),
     ValueError, "the checkpoint has no model.layers.0.attn_res_proj.weight"),
    (lambda m: deepfast.attnres_options(FULL | {"attnres_block_size": 3}), ValueError,
     "must be 1 or even, .* got 3"),
    (lambda m: deepfast.load_attnres(connected(FULL, additive="one"), checkpoint("fla")),
     ValueError, r"'additive': False, .*, got .*'additive': True"),
    (lambda m: deepfast.load_attnres(connected(FULL, sublayers=None), checkpoint("fla")),
     ValueError, r"'reads': 2, 'norm_affine': True, .* got .*'reads': 1"),
])  # fmt: skip
def test_errors(call, error, message):
    model = connected(FULL)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(error, match=message):
        call(model)
    if error is not RuntimeError:
        assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())
