"""A deep encoder in the stages of a pipeline, one for each process.

    torchrun --nproc-per-node 4 examples/pipeline.py --layers 48 --steps 200

Every layer of the encoder reads all layers below it (DLCL), also those of other stages. The model
reads a sequence and writes it backwards. At the end the stages' parameters are loaded into one
whole encoder.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import deepfast

SYMBOLS, LENGTH = 10, 8


class Part(nn.Module):
    """A stage; the first one also has the embeddings, and the last one the output's weight."""

    def __init__(self, stage: deepfast.parallel.EncoderStage):
        super().__init__()
        self.stage = stage
        self.symbols = self.places = self.output = None
        if stage.below is None:
            self.symbols = nn.Embedding(SYMBOLS, stage.dim)
            self.places = nn.Parameter(torch.randn(LENGTH, stage.dim))
        if stage.above is None:
            self.output = nn.Linear(stage.dim, SYMBOLS, bias=False)

    def forward(self, *payload: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.symbols is not None:
            (tokens,) = payload
            payload = (self.symbols(tokens) + self.places,)
        return self.stage(*payload)

    def loss(self, encoded: Tensor, target: Tensor) -> Tensor:
        """The logits are never held at once."""
        return deepfast.ops.linear_cross_entropy(encoded, self.output.weight, target)


def make_part(layers: int, dim: int, stages: int, index: int) -> Part:
    # Every process makes the encoder from the same seed and keeps its own stage. To begin with a
    # checkpoint, load it into the encoder here.
    torch.manual_seed(0)
    encoder = deepfast.nn.TransformerEncoder(
        layers, dim, num_heads=4, ffn_dim=4 * dim, dropout=0.0, recompute="layer+input"
    )
    stage = deepfast.parallel.split(encoder, stages)[index]
    if index == 0:
        print(deepfast.parallel.edge_payload(encoder.connection.depth, stages))
    return Part(stage)


def train(layers: int, dim: int, steps: int, sentences: int = 32, pieces: int = 8) -> list[float]:
    """Returns the loss of every step; it is known in the last process."""
    rank, stages = dist.get_rank(), dist.get_world_size()
    part = make_part(layers, dim, stages, rank)
    pipe = PipelineStage(part, rank, stages, torch.device("cpu"))
    schedule = Schedule1F1B(pipe, n_microbatches=pieces, loss_fn=part.loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)
    batches = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for step in range(steps):
        tokens = torch.randint(SYMBOLS, (sentences, LENGTH), generator=batches)
        optimizer.zero_grad()
        of_pieces: list[Tensor] = []
        inputs = [tokens] if rank == 0 else []
        if rank < stages - 1:
            schedule.step(*inputs)
        else:
            schedule.step(*inputs, target=tokens.flip(1), losses=of_pieces)
            losses.append(torch.stack(of_pieces).mean().item())
            if step % 50 == 49 or step == steps - 1:
                print(f"step {step + 1}: loss {losses[-1]:.3f}")
        # Every stage has a copy of the connection's weights and a part of their gradients.
        deepfast.parallel.sum_connection_gradients([part])
        optimizer.step()
    save(part.stage, layers, dim)
    return losses


def save(stage: deepfast.parallel.EncoderStage, layers: int, dim: int) -> None:
    """Gathers the stages' parameters: they are those of the whole encoder, by the same names."""
    states: list = [None] * stage.stages
    dist.all_gather_object(states, stage.state_dict())
    encoder = deepfast.nn.TransformerEncoder(layers, dim, num_heads=4, ffn_dim=4 * dim)
    encoder.load_state_dict({name: p for state in states for name, p in state.items()})
    if stage.above is None:
        print(f"gathered {len(encoder.state_dict())} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.layers, args.dim, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
