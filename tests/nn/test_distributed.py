"""One training step on two ranks, connected by gloo on the CPU: replicated and sharded forms with
recompute policies, each against a plain one in the same process that keeps everything."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepfast.nn import TransformerEncoder

FORMS = [
    "ddp/pre/ffn", "ddp/pre/layer+input", "ddp/post/layer", "ddp/attnres/none",
    "fsdp/pre/none", "fsdp/pre/layer+input", "fsdp/post/layer", "fsdp/attnres/ffn",
    "fsdp/attnres/layer+input",
]  # fmt: skip


def encoder(kind, recompute="none"):
    """kind: the norm, with DLCL; or "attnres", where each sublayer is a call of its layer."""
    options = {"connection": kind} if kind == "attnres" else {"norm": kind}
    torch.manual_seed(0)
    return TransformerEncoder(4, 16, 2, 24, dropout=0.0, recompute=recompute, **options)


def batch():
    """Each rank has its own sentences."""
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    return torch.randn(3, 4, 16, generator=generator)


def assert_averaged(module, plain, error=None):
    """The gradients are those of plain modules, averaged over ranks; within an ``error`` relative
    to the norm of each."""
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        dist.all_reduce(q.grad)
        q.grad /= dist.get_world_size()
        if error is None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
        else:
            off = (p.grad.full_tensor() - q.grad).norm() / q.grad.norm().clamp_min(1e-6)
            assert off < error, f"{name}: {off:.2g}"


def ddp(norm, recompute):
    plain, wrapped = encoder(norm), DistributedDataParallel(encoder(norm, recompute))
    for module in (plain, wrapped):
        module(batch()).square().sum().backward()
    assert_averaged(wrapped.module, plain)


def fsdp(norm, recompute):
    """bf16 compute, sharded layer by layer; the connection, with W, keeps its fp32 parameters."""
    plain, module = encoder(norm), encoder(norm, recompute)
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    full = MixedPrecisionPolicy(param_dtype=None, cast_forward_inputs=False)
    for layer in module.layers:
        fully_shard(layer, mp_policy=low)
    fully_shard(module.connection, mp_policy=full)
    fully_shard(module, mp_policy=low)
    seen = []
    module.connection.depth.register_forward_pre_hook(
        lambda m, _: seen.append(next(m.parameters()).dtype)
    )

    y = module(batch())
    with torch.autocast("cpu", torch.bfloat16):
        expected_y = plain(batch())
    assert y.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    torch.testing.assert_close(y, expected_y)
    for out in (y, expected_y):
        out.float().square().sum().backward()
    # bf16 gradients of bf16 parameters against fp32 gradients that are never rounded.
    assert_averaged(module, plain, 1e-2)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def step(form, norm, recompute):
    {"ddp": ddp, "fsdp": fsdp}[form](norm, recompute)


@pytest.mark.slow
def test_two_ranks(agree_on_ranks):
    agree_on_ranks(2, step, FORMS)
