"""A chain of cheap layers with DLCL: by the engine, in naive form, and by the specification."""

import pytest
import torch
import torch.nn.functional as F

from deepfast.nn import DLCL, DepthHistory
from deepfast.reference.depth_mix import dlcl as specification


@pytest.fixture(autouse=True)
def _poisoned_on_one_thread(poison, threads):
    """Fresh memory is NaN. One thread, unless a test asks for more: most tensors here are tiny."""
    with threads(1):
        yield


def applied_weight(module, weight):
    """W as the design defines it: the pattern, the softmax, the groups. Independent of `DLCL`."""
    rows = weight.shape[0]
    row, k = torch.arange(rows).view(-1, 1), torch.arange(rows).view(1, -1)
    age = row - k
    window = rows if module.window is None else module.window
    mask = (age >= 0) & (age < window) & (age % module.dilation == 0)
    mask &= (row % module.period == 0) | (age == 0)
    mask = mask.view(rows, rows, *(1,) * (weight.dim() - 2))
    if module.softmax:
        weight = weight.masked_fill(~mask, -torch.inf).softmax(1)
    weight = weight.masked_fill(~mask, 0)
    return weight[..., torch.arange(module.dim) % module.groups] if module.groups else weight


class Pairs:
    """``weight[row, k]``, without a full-sized gradient for each entry."""

    def __init__(self, weight):
        self.rows = [w.unbind(0) for w in weight.unbind(0)]

    def __getitem__(self, pair):
        return self.rows[pair[0]][pair[1]]


class Chain:
    """``y_0 = embedding``, ``y_{l+1} = tanh(scale_l * x_{l+1})``, and DLCL between."""

    def __init__(self, layers, dim, *, tokens=3, block=None, inplace=True, **options):
        self.dlcl = DLCL(layers, dim, **options)
        self.block, self.inplace, self.layers = block, inplace, layers
        self.embedding = torch.randn(tokens, dim)
        self.scales = 1 + 0.1 * torch.randn(layers, dim)
        self.dout = torch.randn(tokens, dim)
        with torch.no_grad():
            for name, p in self.dlcl.named_parameters():
                if p.requires_grad:
                    p.mul_(1 + 0.3 * torch.randn_like(p))
                    # Also outside the pattern, where it must not be read.
                    p.add_(0.1 / (layers + 1) * torch.randn_like(p) if name == "weight" else 0)
                    p.add_(0.1 * torch.randn_like(p) if name == "norm_bias" else 0)

    def layer(self, x, scale):
        return torch.tanh(scale * x)

    def history(self):
        return DepthHistory(block=self.block, inplace=self.inplace)

    def engine(self, embedding, scales, params=None, history=None):
        """The engine's output. ``params`` is unused: the engine reads its own."""
        history = self.history() if history is None else history
        x = self.dlcl(embedding, history)
        for scale in scales.unbind(0):
            x = self.dlcl(self.layer(x, scale.to(x.dtype)), history)
        return x

    def naive(self, embedding, scales, params):
        """Stack and sum at every layer, in the dtype of the embedding."""
        d, dtype = self.dlcl, embedding.dtype
        p = {name: value.to(dtype) for name, value in params.items()}
        w = applied_weight(d, p["weight"])
        w = w.unsqueeze(-1) if w.dim() == 2 else w

        def layer_norm(x, k):
            if k == 0 and not d.normalize_embedding:
                return x
            if d.norm_kind == "rms":
                return F.rms_norm(x, (d.dim,), p["norm_weight"][k], d.eps)
            return F.layer_norm(x, (d.dim,), p["norm_weight"][k], p["norm_bias"][k], d.eps)

        y, states = embedding, []
        for row in range(self.layers + 1):
            states.append(layer_norm(y, row) if d.norm == "pre" else y)
            x = (torch.stack(states) * w[row, : row + 1].unsqueeze(1)).sum(0)
            x = layer_norm(x, row) if d.norm == "post" else x
            y = self.layer(x, scales[row].to(dtype)) if row < self.layers else x
        return y

    def specified(self, embedding, scales, params):
        """deepfast.reference.depth_mix.dlcl, row by row."""
        d, states = self.dlcl, [embedding]
        w = Pairs(applied_weight(d, params["weight"]))
        for row in range(self.layers + 1):
            x = specification(
                states, row, w, norm=d.norm, norm_weight=params.get("norm_weight"),
                norm_bias=params.get("norm_bias"), normalize_embedding=d.normalize_embedding,
                eps=d.eps, rms=d.norm_kind == "rms",
            )  # fmt: skip
            if row < self.layers:
                states.append(self.layer(x, scales[row]))
        return x

    def run(self, form, dtype):
        """Output and every gradient of one form by name."""
        embedding = self.embedding.detach().clone().to(dtype).requires_grad_()
        exact = dtype == torch.float64
        scales = (self.scales.double() if exact else self.scales).clone().requires_grad_()
        if form == self.engine:
            self.dlcl.to(torch.float64 if exact else torch.float32).zero_grad()
            params = dict(self.dlcl.named_parameters())
        else:
            params = {
                name: p.detach().to(torch.float64 if exact else torch.float32)
                .requires_grad_(p.requires_grad)
                for name, p in self.dlcl.named_parameters()
            }  # fmt: skip
        out = form(embedding, scales, params)
        out.backward(self.dout.to(out.dtype))
        result = {"out": out.detach(), "embedding": embedding.grad, "scales": scales.grad}
        return result | {name: p.grad for name, p in params.items() if p.requires_grad}

    def compare(self, tolerances, dtype):
        got = self.run(self.engine, dtype)
        plain = self.run(self.naive, tolerances.plain_dtype(dtype))
        exact = self.run(self.specified, torch.float64)
        # A norm that is never applied gets no gradient: None, or zeros from an unbound row.
        for name in [n for n, g in exact.items() if g is None]:
            assert got[name] is None or got[name].eq(0).all()
            del got[name], plain[name], exact[name]
        tolerances.assert_all_accurate(got, plain, exact, dtype)
        return got


@pytest.fixture(scope="session")
def chain():
    """The class `Chain`."""
    return Chain
