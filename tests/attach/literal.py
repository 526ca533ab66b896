"""The literal loop: a list of states, and each layer's input summed from it in plain PyTorch."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from deepfast.attach.passes import NAME
from deepfast.reference.attention_residuals import full


class Literal(nn.Module):
    """In place of a layer: runs it, then computes the next layer's input."""

    def __init__(self, layer, k, states, mix, added):
        super().__init__()
        self.inner, self.k, self.states, self.mix, self.added = layer, k, states, mix, added

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def forward(self, x, *args, **kwargs):
        if self.k == 0:
            self.states[:] = [x]
            x = self.mix(self.states)
        result = self.inner(x, *args, **kwargs)
        y = result[0] if isinstance(result, tuple) else result
        self.states.append(y - x if self.added else y)
        y = self.mix(self.states)
        return (y, *result[1:]) if isinstance(result, tuple) else y


def mixture(connection):
    """The connection's formula; its parameters are those of a copy in the literal model."""
    if not hasattr(connection, "weight"):
        return lambda states: full(states, connection.query, len(states) - 1)

    def norm(x, k):
        if connection.norm is None or k == 0:
            return x
        weight, shape = connection.norm_weight[k], x.shape[-1:]
        if connection.norm_kind == "rms":
            return F.rms_norm(x, shape, weight, connection.eps)
        return F.layer_norm(x, shape, weight, connection.norm_bias[k], connection.eps)

    def mix(states):
        row = len(states) - 1
        if connection.norm == "pre":
            states = [norm(y, k) for k, y in enumerate(states)]
        x = sum(w * y for w, y in zip(connection.weight[row], states, strict=False))
        return norm(x, row) if connection.norm == "post" else x

    return mix


def literal_of(case, plain, connected):
    """Puts the literal loop into ``plain``, with copies of the connections of ``connected``.

    Returns:
        The parameters by the names that they have in ``connected``.
    """
    named = {}
    for path, parent, layers in case.places(plain):
        connection = copy.deepcopy(connected.get_submodule(path)._modules[NAME])
        found = getattr(parent, layers) if layers else parent
        mix, added, states = mixture(connection), hasattr(connection, "query"), []
        for k, layer in enumerate(found):
            found[k] = Literal(layer, k, states, mix, added)
        for name, p in connection.named_parameters():
            named[".".join(filter(None, (path, NAME, name)))] = p
    return named | {name.replace(".inner.", "."): p for name, p in plain.named_parameters()}


def results(case, model, named):
    """The output and all gradients, by name."""
    out = case.run(model)
    out.square().mean().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
    return {"output": out.detach(), **grads}
