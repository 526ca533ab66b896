"""Small encoders, one training step of them in one process, and the same step through stages."""

import torch

from deepfast.nn import TransformerEncoder
from deepfast.parallel import split

DIM, SENTENCES, LENGTH = 12, 2, 5

CONNECTIONS = {
    "dlcl": {},
    "dlcl, post-norm": {"norm": "post"},
    "dlcl, no norms": {"dlcl": {"norm": None}},
    "dlcl, vector": {"dlcl": {"weight_type": "vector", "normalize_embedding": True}},
    "dlcl, group, post-norm": {
        "norm": "post",
        "dlcl": {"weight_type": "group", "groups": 5, "normalize_embedding": True},
    },
    "dlcl, softmax": {"dlcl": {"softmax": True}, "norm_type": "rms"},
    "dlcl, rms, post-norm": {"norm": "post", "norm_type": "rms"},
    "dlcl, window": {"dlcl": {"window": 3}},
    "denseformer": {"connection": "denseformer"},
    "denseformer, dilation": {"connection": "denseformer", "dlcl": {"dilation": 2, "period": 3}},
    "attnres": {"connection": "attnres"},
    "attnres, one read": {"connection": "attnres", "reads": 1},
    "block_attnres": {"connection": "block_attnres", "block": 2},
    "block_attnres, one read": {"connection": "block_attnres", "block": 2, "reads": 1},
}
"""Name -> the options of an encoder."""


def encoder(layers, dtype=torch.float32, seed=0, **options):
    """Its parameters are not at their initial values, where many gradients are 0."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    made = TransformerEncoder(layers, DIM, 2, 16, **{"dropout": 0.0, **options}).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator).to(p)
    return made


def batch(sentences=SENTENCES, dtype=torch.float32):
    """The embedding, the target and the padding of a batch."""
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, sentences, LENGTH, DIM, generator=generator).to(dtype)
    padding = torch.zeros(sentences, LENGTH, dtype=torch.bool)
    padding[1::2, 3:] = True
    return x, target, padding


def loss(out, target):
    return (out - target).square().mean()


def whole_step(model, x, target, padding):
    """The loss and every gradient, that of the embedding under "x", in one process."""
    x = x.clone().requires_grad_()
    found = loss(model(x, padding), target)
    found.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": found.detach(), "x": x.grad} | grads


def run(stages, x, padding):
    """The output, and what crossed each edge."""
    payload, crossed = (x,), []
    for stage in stages:
        sent = stage(*payload, key_padding_mask=padding)
        payload = sent if isinstance(sent, tuple) else (sent,)
        crossed.append(payload)
    return payload[0], crossed[:-1]


def staged_step(stages, model, x, target, padding):
    """The same as `whole_step` through stages, one after another."""
    parts = split(model, stages)
    x = x.clone().requires_grad_()
    found = loss(run(parts, x, padding)[0], target)
    found.backward()
    return {"loss": found.detach(), "x": x.grad} | gradients(parts)


def gradients(parts):
    """Sums the copies' gradients of the connection."""
    found = {}
    for part in parts:
        for name, p in part.named_parameters():
            if p.grad is not None:
                found[name] = found.get(name, 0) + p.grad
    return found
