"""A deep encoder whose parameters are sharded (FSDP2), in a training loop of your own.

    torchrun --nproc-per-node 2 examples/fsdp.py --layers 24 --steps 200

Every layer reads all layers below it (DLCL). Each layer is a unit of FSDP2; what is left, with the
connection, is the unit of the whole model. The model reads a sequence and writes it backwards. At
the end the shards are saved as one checkpoint, and loaded again.

On two machines, the same command on each, with a folder that both see for the checkpoint:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 \
        --rdzv-id reverse examples/fsdp.py
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import deepfast

SYMBOLS, LENGTH = 10, 8


class Reverser(nn.Module):
    def __init__(self, layers: int, dim: int):
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, dim)
        self.places = nn.Parameter(torch.randn(LENGTH, dim))
        self.encoder = deepfast.nn.TransformerEncoder(
            layers, dim, num_heads=4, ffn_dim=4 * dim, dropout=0.0, recompute="layer+input"
        )
        self.output = nn.Linear(dim, SYMBOLS, bias=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """The loss. It belongs here: outside of forward the output's weight is sharded."""
        encoded = self.encoder(self.symbols(tokens) + self.places)
        return deepfast.ops.linear_cross_entropy(encoded, self.output.weight, target)


def make_model(layers: int, dim: int) -> Reverser:
    torch.manual_seed(0)
    model = Reverser(layers, dim)
    for layer in model.encoder.layers:
        fully_shard(layer)
    # In bf16: fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), but
    # not here, so that the connection's weights stay in fp32.
    return fully_shard(model)


def save_and_load(model: Reverser, again: Reverser, folder: str) -> None:
    """Each process writes and reads its own shards."""
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(again)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(again, state)


def train(
    layers: int, dim: int, steps: int, sentences: int = 32, folder: str | None = None
) -> list[float]:
    """Returns the loss of every step, the mean over processes.

    folder: of the checkpoint; None for a temporary one.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make_model(layers, dim)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Each process has its own sentences.
    batches = torch.Generator().manual_seed(1 + rank)
    losses = []
    for step in range(steps):
        tokens = torch.randint(SYMBOLS, (sentences, LENGTH), generator=batches)
        loss = model(tokens, tokens.flip(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / ranks)
        if rank == 0 and (step % 50 == 49 or step == steps - 1):
            print(f"step {step + 1}: loss {losses[-1]:.3f}")
    again = make_model(layers, dim)
    if folder is None:
        names = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(names)
        folder = names[0]
    save_and_load(model, again, folder)
    tokens = torch.randint(SYMBOLS, (sentences, LENGTH), generator=batches)
    with torch.no_grad():
        same = torch.equal(model(tokens, tokens), again(tokens, tokens))
    if rank == 0:
        print(f"saved and loaded: {same}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", help="of the checkpoint; by default a temporary one")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.layers, args.dim, args.steps, folder=args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
