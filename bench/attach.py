"""Memory of a training step of connected models of others, by `LiveBytes`: states a layer.

    python -m bench.attach        # torch's encoder, and BERT where transformers is installed

One state is T x D float32. A number is the peak of forward and backward, without the parameters
and their gradients, divided by the layers.
"""

import argparse
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepfast
from deepfast.memory import LiveBytes

FORMS = (
    "no connection", "no connection, checkpointed", "literal loop, checkpointed", "none",
    "none, checkpointed", "layer", "layer+input",
)  # fmt: skip


class Wrapped(nn.Module):
    """In place of a layer, with its attributes."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.layer, name)


class Checkpointed(Wrapped):
    """A layer that is checkpointed inside of its call, as transformers does it."""

    def forward(self, x: Tensor, *args, **kwargs):
        return checkpoint(self.layer, x, *args, use_reentrant=False, **kwargs)


class Literal(Wrapped):
    """A layer, then the sum of all states: DLCL in plain PyTorch."""

    def __init__(self, layer: nn.Module, k: int, weight: Tensor, states: list[Tensor]):
        super().__init__(layer)
        self.k, self.weight, self.states = k, weight, states

    def mixed(self) -> Tensor:
        row = self.weight[len(self.states) - 1]
        x = sum(w * y for w, y in zip(row, self.states, strict=False))
        # The layer-norm of the row; the embedding's has none.
        return F.layer_norm(x, x.shape[-1:]) if len(self.states) > 1 else x

    def forward(self, x: Tensor, *args, **kwargs):
        if self.k == 0:
            self.states[:] = [x]
            x = self.mixed()
        result = self.layer(x, *args, **kwargs)
        self.states.append(result[0] if isinstance(result, tuple) else result)
        x = self.mixed()
        if len(self.states) == len(self.weight):
            self.states.clear()
        return (x, *result[1:]) if isinstance(result, tuple) else x


def torch_encoder(layers: int, dim: int) -> tuple[nn.Module, Callable]:
    """The parent of the layers, and how the model is called."""
    layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return encoder, encoder


def bert(layers: int, dim: int) -> tuple[nn.Module, Callable]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100, hidden_size=dim, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * dim,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    return model.encoder, lambda x: model(inputs_embeds=x).last_hidden_state


def states_per_layer(make: Callable, form: str, layers: int, dim: int, batch: int, length: int):
    """Peak bytes of a step, in states of all layers."""
    torch.manual_seed(0)
    parent, run = make(layers, dim)
    name = "layers" if make is torch_encoder else "layer"
    found = getattr(parent, name)
    if form.endswith("checkpointed"):
        for k, layer in enumerate(found):
            found[k] = Checkpointed(layer)
    if form.startswith("literal"):
        weight = nn.Parameter(torch.ones(layers + 1, layers + 1) / (layers + 1))
        states: list[Tensor] = []
        for k, layer in enumerate(found):
            found[k] = Literal(layer, k, weight, states)
    elif not form.startswith("no connection"):
        deepfast.connect(
            parent, name, norm="post", dim=dim, recompute=form.removesuffix(", checkpointed")
        )
    x = torch.randn(batch, length, dim)

    def step() -> None:
        run(x).square().mean().backward()

    step()  # makes the gradients
    with LiveBytes() as live:
        step()
    return live.peak / (layers * x.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    makes = {"torch": torch_encoder}
    if importlib.util.find_spec("transformers") is not None:
        makes["BERT"] = bert
    print(f"layers={args.layers} T={args.batch * args.length} D={args.dim}")
    print("| form |", *(f"{name} |" for name in makes))
    print("|---|" + "---|" * len(makes))
    for form in FORMS:
        row = [states_per_layer(make, form, **vars(args)) for make in makes.values()]
        print(f"| {form} |", *(f"{states:.2f} |" for states in row), flush=True)


if __name__ == "__main__":
    main()
