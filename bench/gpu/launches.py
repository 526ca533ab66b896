"""Every CUDA kernel once, at small sizes: for a sanitizer, and to list what launches need.

compute-sanitizer --tool racecheck python -m bench.gpu.launches
"""

import sys

import torch

from deepfast.depth.state import empty_slots

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYERS = 100
# Rows of the second are no multiple of 16 bytes, so other kernels run.
SIZES = ((37, 512), (9, 100), (5, 2048))


def _slots(count: int, tokens: int, dim: int, **kind) -> torch.Tensor:
    return empty_slots(count, torch.empty(tokens, dim, **kind)).zero_()


def _layer_norm(ops, x, y, z, channels, stat, seed) -> None:
    one, stat = channels, (stat, stat.clone())
    ops.layer_norm_forward(x, x, one, one, 1e-5, 0.1, seed, y, z, *stat)
    ops.layer_norm_backward(
        x, x, x, one, *stat, 0.1, seed, y, z, torch.empty_like(one), torch.empty_like(one)
    )


def _depth_mix(ops, x, y, weight, norm_weight) -> None:
    count, tokens = len(weight), len(x)
    sources, mean = [x] * count, norm_weight.new_zeros(count, tokens)
    # Without a bias another kernel runs.
    for norm_bias in (norm_weight, None):
        ops.depth_mix_forward(
            sources, weight, norm_weight, norm_bias, True, 1e-5, y, mean, mean.clone()
        )
        results = [torch.empty_like(x) for _ in sources]
        ops.depth_mix_backward(
            sources, weight, norm_weight, norm_bias, True, mean, mean, x, results,
            torch.empty_like(weight), torch.empty_like(norm_weight),
            None if norm_bias is None else torch.empty_like(norm_weight),
        )  # fmt: skip


def _far_passes(ops, states, weight, norm_weight, block: int) -> None:
    far, near = list(range(80)), list(range(80, 80 + block))
    # Rows that are out of order make the launch scatter its sums.
    near[:2] = reversed(near[:2])
    out = _slots(block, *states.shape[1:], dtype=states.dtype, device=states.device)
    places = list(range(block))
    ops.mix_rows(states, far, weight, near, norm_weight, norm_weight, out, places, False)
    for dweight in (torch.zeros_like(weight), None):
        ops.pull_rows(
            states, [r + 1 for r in near], near, states, far[:block], weight, norm_weight,
            norm_weight, out, places, False, dweight,
        )  # fmt: skip


def _boundary(ops, states, x, y, z, weight, norm_weight, channels, stat, seed) -> None:
    near, row = list(range(88, 92)), 91
    stats = stat, stat.clone(), stat.clone()
    ops.boundary_forward(
        x, x, 0.1, seed, states, row, near, weight, norm_weight, norm_weight, True, 1e-5, y,
        channels, channels, 1e-5, y, z, *stats,
    )  # fmt: skip
    sums = [torch.empty_like(channels) for _ in range(4)]
    pulls = [91, 93, 94]
    ops.boundary_backward(
        states, row, near, weight, norm_weight, norm_weight, True, y, channels, channels,
        *stats, 0.1, seed, x, x, states, row + 1, pulls, [r + 1 for r in pulls], x, y, z,
        torch.zeros_like(weight), *sums,
    )  # fmt: skip


def every_launch(ops, device: str, tokens: int, dim: int) -> None:
    """All launches of ``ops``, a namespace of `torch.ops`, with every dtype and kind of weight."""
    f32 = {"device": device}
    channels, stat = torch.ones(dim, **f32), torch.ones(tokens, **f32)
    seed, norm_weight = torch.tensor(1, **f32), torch.ones(LAYERS, dim, **f32)
    for dtype in DTYPES:
        x, y, z = torch.ones(3, tokens, dim, dtype=dtype, **f32)
        _layer_norm(ops, x, y, z, channels, stat, seed)
        states = _slots(LAYERS + 1, tokens, dim, dtype=dtype, **f32)
        for per_channel in ((), (dim,)):
            _depth_mix(ops, x, y, torch.ones(3, *per_channel, **f32), norm_weight[:3].clone())
            weight = torch.ones(LAYERS, LAYERS, *per_channel, **f32)
            for block in (4, 8, 16):
                _far_passes(ops, states, weight, norm_weight, block)
            _boundary(ops, states, x, y, z, weight, norm_weight, channels, stat, seed)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 2
    for tokens, dim in SIZES:
        every_launch(torch.ops.deepfast, "cuda", tokens, dim)
    torch.cuda.synchronize()
    print("every launch ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
