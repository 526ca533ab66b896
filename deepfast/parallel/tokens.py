"""A depth connection whose tokens are shared out over ranks (sequence-parallel tensor parallelism).

The mix is per token, so every rank mixes its own tokens. Three things cross ranks: the gradients of
W, queries and norms are summed, all ranks use the same seeds, and the dropout mask of a token is
that of its place among all tokens.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh

from deepfast import checks, ops
from deepfast.depth.connection import DepthConnection
from deepfast.depth.rows import OutNorm
from deepfast.dtypes import compute_dtype
from deepfast.ops import common
from deepfast.reference.dropout import dropout_scale

OP = "deepfast.parallel.shard_tokens"


@common.traced_as("sum_gradient")
class _SumGradient(torch.autograd.Function):
    """The parameter; its gradient is summed over the ranks of ``group``."""

    @staticmethod
    def forward(ctx, p, group):
        ctx.group = group
        return p.view_as(p)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


@common.traced_as("dropout_of_shard")
class _Dropout(torch.autograd.Function):
    """Dropout of a shard; backward draws the mask again. kept: () -> where it keeps elements."""

    @staticmethod
    def forward(ctx, y, p, kept):
        ctx.scale, ctx.kept = dropout_scale(p), kept
        return _dropped(y, ctx.scale, kept())

    @staticmethod
    @common.first_order("depth connection")
    def backward(ctx, grad):
        return _dropped(grad, ctx.scale, ctx.kept()), None, None


def _dropped(y: Tensor, scale: float, kept: Tensor) -> Tensor:
    return torch.where(kept, y.to(compute_dtype(y.dtype)) * scale, 0).to(y.dtype)


class TokenShards:
    """What the ranks of a mesh of one dimension do that share the tokens of a pass.

    Args:
        mesh: the ranks.
        axis: the axis of an input (..., D) that is shared out.
        backend: of the op that draws the dropout masks, see `deepfast.backend`.
    """

    def __init__(self, mesh: DeviceMesh, axis: int, backend: str | None = None):
        self.mesh, self.axis, self.backend = mesh, axis, backend
        self.group = mesh.get_group()
        # Of the last input: the size of the axis over all ranks, and the shape of a DTensor.
        self.length = 0
        self.shape: torch.Size | None = None

    def __deepcopy__(self, _memo) -> "TokenShards":
        # The hooks of a copied connection refer to this object too.
        return self

    @property
    def placements(self) -> list[Placement]:
        return [Shard(self.axis)]

    def local(self, name: str, y: Tensor) -> Tensor:
        """This rank's tokens of an input of the connection, and notes how many all ranks have."""
        if not isinstance(y, DTensor):
            self.length = y.shape[self.axis] * self.mesh.size()
            return y
        if y.device_mesh != self.mesh or y.placements != tuple(self.placements):
            raise ValueError(
                f"{name}: expected an input with placements {self.placements} on the mesh of "
                f"{OP}, got {list(y.placements)} on {y.device_mesh}"
            )
        self.length = y.shape[self.axis]
        return y.to_local()

    def global_(self, x: Tensor | None, shape: torch.Size) -> Tensor | None:
        """The DTensor of which x is this rank's part."""
        if x is None:
            return None
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, self.mesh, self.placements, shape=shape, stride=stride)

    def summed(self, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
        """The parameters; their gradients are summed over all ranks."""
        return tuple(
            None if p is None else _SumGradient.apply(_replicated(p), self.group)
            for p in parameters
        )

    def agree(self, seeds: Tensor) -> None:
        """Makes the seeds those of the first rank."""
        dist.broadcast(seeds, group=self.group, group_src=0)

    def push(
        self, y: Tensor, p: float, seed: Tensor | None, out_norm: OutNorm | None
    ) -> tuple[Tensor, OutNorm | None]:
        """What is pushed, after its dropout, and the norm after it."""
        if out_norm is not None:
            weight, bias = self.summed(out_norm.weight, out_norm.bias)
            out_norm = out_norm._replace(weight=weight, bias=bias)
        if p > 0:
            one = y.new_ones(1, y.shape[-1])
            kept = functools.partial(self._kept, y.shape, self.length, one, p, seed)
            y = _Dropout.apply(y, p, kept)
        return y, out_norm

    def _kept(self, shape: torch.Size, length: int, one: Tensor, p: float, seed: Tensor) -> Tensor:
        """Where the mask keeps this rank's elements, of the shape of its part.

        The mask of all tokens, from which it takes its part, is a launch of a kernel that draws
        the masks of one process: dropout of ones.
        """
        size, rank = self.mesh.size(), self.mesh.get_local_rank()
        # As torch.chunk: every part but the last ones has the same size.
        first = min(rank * -(-length // size), length)
        whole = torch.Size((*shape[: self.axis], length, *shape[self.axis + 1 :]))
        ones = one.expand(whole[:-1].numel(), shape[-1])
        mask = ops.activation(
            ones, "relu", dropout_p=p, training=True, seed=seed, backend=self.backend
        )
        return mask.view(whole).narrow(self.axis, first, shape[self.axis]) != 0


def _replicated(p: Tensor) -> Tensor:
    """A parameter that every rank has, as a plain tensor."""
    if not isinstance(p, DTensor):
        return p
    if any(not isinstance(placement, Replicate) for placement in p.placements):
        raise ValueError(f"{OP}: a norm's parameter must be replicated, got {list(p.placements)}")
    return p.to_local()


def shard_tokens(connection: DepthConnection, mesh: DeviceMesh, axis: int = 1) -> None:
    """Shards the tokens of a depth connection over the ranks of ``mesh``, in place.

    For models whose layers are tensor parallel and whose residual stream is sharded over tokens
    (`torch.distributed.tensor.parallel.SequenceParallel`). From then on the connection takes and
    returns DTensors with placement ``Shard(axis)``, or plain tensors that are this rank's part,
    all of one size. The result is that of one process with all tokens, dropout included: the seeds
    are those of the first rank.

    In backward the gradients of the connection's parameters, and of the norms that it applies
    (``out_norm``), are summed over the ranks. Its own parameters stay plain tensors, the same on
    every rank. To draw its part of a dropout mask a rank draws the mask of all tokens.

    Args:
        connection: a `deepfast.nn.DLCL` or `deepfast.nn.AttentionResiduals`.
        mesh: of one dimension, the ranks of the tensor parallelism.
        axis: the axis that is sharded: 1 for (B, S, D); 0 for (T, D) and (S, B, D).

    Raises:
        TypeError, ValueError: for another connection, mesh or axis.
    """
    if not isinstance(connection, DepthConnection):
        kind = type(connection).__name__
        raise TypeError(f"{OP}: expected a DLCL or AttentionResiduals, got {kind}")
    if connection.shards is not None:
        raise ValueError(f"{OP}: the tokens of this {connection.name} are sharded already")
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f"{OP}: mesh must be a DeviceMesh of one dimension, got {mesh!r}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"{OP}: mesh must contain this rank, got {mesh!r}")
    checks.whole(OP, 0, axis=axis)
    shards = connection.shards = TokenShards(mesh, axis)

    def before(module, args, kwargs):
        if not args and "y" in kwargs:
            args, kwargs = (kwargs["y"],), {k: v for k, v in kwargs.items() if k != "y"}
        y, *rest = args or (None,)
        checks.tensor(module.name, "the layer's output", y)
        if y.dim() - 1 <= axis:
            raise ValueError(
                f"{module.name}: the input must have a sharded axis {axis} before its channels, "
                f"got {tuple(y.shape)}"
            )
        shards.shape = y.shape if isinstance(y, DTensor) else None
        if kwargs.get("residual") is not None:
            kwargs = kwargs | {"residual": shards.local(module.name, kwargs["residual"])}
        return (shards.local(module.name, y), *rest), kwargs

    def after(_module, _args, result):
        shape = shards.shape
        if shape is None:
            return result
        if isinstance(result, tuple):
            return tuple(shards.global_(x, shape) for x in result)
        return shards.global_(result, shape)

    connection.register_forward_pre_hook(before, with_kwargs=True)
    connection.register_forward_hook(after)
