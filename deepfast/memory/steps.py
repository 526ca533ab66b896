"""A layer's forward and backward step by step: the tensors that each step creates and frees.

Sizes are those of a micro-batch. In the names of tensors:

    x, n     the layer's input and its layer-norm; n2, n3 in front of the later blocks
    qkv, o   projections of the attention, and its result; q, kv and o2 for the second attention
    a, c     the branches of the attentions
    s, h     the sum before the feed-forward block and the hidden activation; act is GELU of h
    out      the branch of that block; in post-norm s2 is the sum after it, and y the result
    d_       the gradient of a tensor; w_ the gradient of a weight
"""

from dataclasses import dataclass
from typing import NamedTuple

from deepfast.memory.sizes import Sizes
from deepfast.policies import ATTENTION_RESIDUALS, MIXING, RERUN

FP32 = 4


class Moment(NamedTuple):
    """Bytes alive at one point of a step, without parameters and optimizer state."""

    gradients: int = 0
    copies: int = 0
    history: int = 0
    activations: int = 0
    transient: int = 0
    head: int = 0

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Step:
    """One point of a layer's forward or backward, in bytes."""

    alive: int
    """Bytes of all tensors of the layer, except its weights and their gradients."""
    gradients: int
    """Bytes of gradients that have reached the layer's weights."""
    part: int
    """How many boundaries of forward lie between the layer's start and this step."""


class Walk:
    """The tensors that are alive, by name, and every step so far.

    Args:
        kept: names of tensors that are kept for backward, and their bytes.
        alive: the tensors at the start.
    """

    def __init__(self, kept: dict[str, int], **alive: int):
        self.kept, self.alive = kept, alive
        self.gradients = self.part = 0
        self.steps: list[Step] = []

    low = False
    """Whether gradients of weights are computed in 16 bits."""

    gated: tuple[str, ...] = ()
    """Names of the gradients of weights that latent depth has multiplied by a gate."""

    def make(self, **born: int) -> None:
        self.alive |= born
        self.steps.append(Step(sum(self.alive.values()), self.gradients, self.part))

    def drop(self, *names: str) -> None:
        for name in names:
            self.alive.pop(name, None)

    def leave(self, *names: str) -> None:
        """Frees those of the named tensors that backward does not need."""
        self.drop(*(name for name in names if name not in self.kept))

    def learn(self, *names: str) -> None:
        """Adds gradients to their weights; 16-bit gradients are first converted to fp32."""
        for name in names:
            size = self.alive[name]
            if self.low:
                self.make(widened=2 * size)
                self.drop(name, "widened")
                size *= 2
            if name in self.gated:
                self.alive[name] = size
            else:
                self.drop(name)
                self.gradients += size
        # Forward multiplies by the gate first, so backward computes that gradient last.
        for name in filter(self.gated.__contains__, names):
            size = self.alive[name]
            # The weight's gradient, and the product whose sum is the gate's gradient.
            self.make(product=size, summed=size)
            self.drop(name, "product", "summed")
            self.gradients += size


class Layer:
    """The sizes of one layer's tensors, and its forward and backward steps."""

    def __init__(self, sizes: Sizes, policy: str, decoder: bool):
        self.sizes, self.policy, self.decoder = sizes, policy, decoder
        tokens, element = sizes.target_tokens if decoder else sizes.tokens, sizes.bytes
        self.d = tokens * sizes.dim * element
        self.f = tokens * sizes.ffn_dim * element
        self.source = sizes.tokens * sizes.dim * element
        self.qkv = tokens * (sizes.dim + 2 * sizes.kv_width) * element
        self.kv = sizes.tokens * 2 * sizes.kv_width * element
        """Keys and values of the encoder's output."""
        self.square = sizes.dim**2 * element
        """Bytes of a (D, D) weight in the dtype of its products."""
        self.w_kv = 2 * sizes.dim * sizes.kv_width * element
        self.w_qkv = self.square + self.w_kv
        self.w = sizes.dim * sizes.ffn_dim * element
        self.statistics = sizes.norm_values * tokens * FP32
        """What a norm stores for backward."""
        self.lse = tokens * sizes.num_heads * FP32
        # While a tensor is packed or unpacked it exists twice. Both forms of an attention's result
        # are kept.
        self.twice = 2 if sizes.padding else 1
        self.pre, self.gelu = sizes.norm == "pre", sizes.activation == "gelu"
        self.rerun = policy in RERUN
        kind = sizes.kind(decoder)
        self.mixes, self.latent = kind in MIXING, kind == "latent"
        self.attends = kind in ATTENTION_RESIDUALS
        # Without dropout a branch and its residual share one gradient tensor.
        self.branch = self.d if sizes.dropout else 0

    # ---- what is kept --------------------------------------------------------------------------

    def saved(self) -> dict[str, int]:
        """What autograd saves of a layer that keeps everything, in the order of forward.

        Layers that do not run again use fused ops, which save less.
        """
        d, st = self.d, self.statistics
        # With a depth connection n is kept. Without one x is, and n is recomputed from it.
        names = {"n" if self.pre and (self.mixes or self.rerun) else "x": d}
        names |= {"qkv": self.qkv, "o": self.twice * d + self.lse}
        if self.decoder:
            names |= {"s1": d + st, "q": d, "kv": self.kv}
            names |= {"o2": self.twice * d + self.lse}
            names |= {"n2": d} if self.rerun else {}
        names |= {"s": d + st, "h": self.f}
        if self.rerun:
            names |= {} if self.pre else {"n3": d}
            names |= {"act": self.f} if self.gelu else {}
        return names if self.pre else names | {"s2": d + st}

    def kept(self) -> dict[str, int]:
        """What the layer keeps from forward to backward."""
        # The statistics of a depth connection's layer-norms count as the connection's.
        norm = {"norm": self.statistics} if self.pre and not self.mixes else {}
        if self.policy == "layer+input":
            return norm
        if self.policy == "layer":
            return norm | {"x": self.d}
        names = self.saved()
        if self.policy == "ffn":
            del names["h"]
        return norm | names

    def copies(self) -> dict[str, int]:
        """Copies of weights that backward reads: in autocast's dtype, or scaled by a gate."""
        square = self.square
        last = {"cast_o": square, "cast_down": self.w}
        last |= {"cast_o2": square} if self.decoder else {}
        if self.sizes.dtype != "bfloat16":
            return last if self.latent else {}
        names = {"cast": self.w_qkv, "cast_up": self.w} | last
        return names | ({"cast2": self.w_qkv} if self.decoder else {})

    def cached(self) -> dict[str, int]:
        """The copies that autocast's cache or the graph still holds after forward."""
        copies = self.copies()
        if not self.rerun:
            return copies
        # Autocast's cache holds neither copies that an op makes itself nor copies of products.
        others: tuple[str, ...] = ("cast_up",) if self.pre else ()
        others += ("cast_o", "cast_o2", "cast_down") if self.latent else ()
        return {name: size for name, size in copies.items() if name not in others}

    def held(self) -> dict[str, int]:
        """The copies from the layer's forward to its backward: a rerun copies the weights again."""
        return {} if self.rerun else self.cached()

    # ---- forward -------------------------------------------------------------------------------

    def walk_forward(self, walk: Walk) -> None:
        """From x and n to the branch and its residual, in post-norm to y."""
        d, st = self.d, self.statistics
        self._attend(walk)
        walk.make(a=d)
        walk.leave("qkv", "o")
        if self.decoder:
            walk.make(n2=d, s1=d + st)
            self._attend_encoded(walk)
            walk.make(c=d)
            walk.leave("q", "kv", "o2")
        # Under autocast a weight scaled by a gate exists in fp32 too.
        scaled = 2 * self.w if self.latent and self.sizes.dtype == "bfloat16" else 0
        walk.make(n3=d, s=d + st, scaled=scaled)
        walk.make(h=self.f)
        if self.pre:
            walk.leave("n3", "cast_up")
        if self.gelu or self.rerun:
            walk.make(act=self.f)
        if self.rerun and not self.pre:
            # ReLU's result overwrites h.
            walk.leave("h") if self.gelu else walk.drop("act")

    def _attend(self, walk: Walk) -> None:
        walk.make(qkv=self.twice * self.qkv)
        walk.make(qkv=self.qkv, o=self.twice * self.d + self.lse)

    def _attend_encoded(self, walk: Walk) -> None:
        walk.make(q=self.d, kv=self.twice * self.kv)
        walk.make(kv=self.kv, o2=self.twice * self.d + self.lse)

    def forward(self) -> list[Step]:
        walk = Walk(self.kept() | self.cached(), x=self.d, **self.copies())
        if self.pre:
            walk.alive["n"] = self.d
        self.walk_forward(walk)
        walk.make(out=self.d)
        walk.leave("h", "act", "scaled")
        if not self.pre:
            walk.leave("s")
            walk.make(y=self.d, s2=self.d + self.statistics)
            walk.leave("out", "s2")
        walk.leave("a", "n2", "s1", "c", "n3")
        walk.part += 1
        # Then the boundary: the next layer's input and its layer-norm. Attention residuals take
        # what the layer has added, without its input.
        added = self.d if self.attends else 0
        walk.make(added=added, next=2 * self.d if self.pre else self.d if self.mixes else 0)
        return walk.steps

    # ---- backward ------------------------------------------------------------------------------

    def backward(self) -> list[Step]:
        own = {} if self.rerun else self.copies()
        kept = self.saved() | self.copies() if self.rerun else self.kept()
        walk = Walk(kept, **self.kept(), **own)
        walk.low = self.sizes.dtype == "bfloat16"
        walk.gated = ("w_out", "w_down") if self.latent else ()
        # From the boundary above come the gradients of branch and residual; in post-norm that of y.
        walk.alive |= {"d_out": self.branch, "d_s": self.d} if self.pre else {"d_y": self.d}
        if self.attends:
            # The input's gradient from what is added.
            walk.alive["d_added"] = self.d
        if self.rerun:
            self._rerun(walk)
        if not self.pre:
            walk.make(d_out=self.branch, d_s=self.d)
            walk.drop("d_y", "s2")
        (self._blocks if self.rerun else self._fused)(walk)
        if self.decoder:
            self._cross_attention(walk)
            walk.make(d_a=self.branch, d_s1=self.d)
            walk.drop("d_x", "d_n2", "s1")
            walk.alive["d_x"] = walk.alive.pop("d_s1")
        self._attention(walk)
        return walk.steps

    def _rerun(self, walk: Walk) -> None:
        """Runs forward again, up to the last tensor that autograd saves."""
        walk.make(x=self.d, **({"n": self.d} if self.pre else {}), **self.copies())
        self.walk_forward(walk)
        if not self.pre:
            walk.make(out=self.d)
            walk.make(y=self.d, s2=self.d + self.statistics)
        walk.drop("a", "c", "out", "y", "scaled")
        if self.pre and "x" not in self.kept():
            walk.drop("x")
        # ReLU saves only its result.
        walk.leave("n2", "n3", *([] if self.gelu else ["act"]))

    def _fused(self, walk: Walk) -> None:
        """The feed-forward block as one op."""
        d, f, w = self.d, self.f, self.w
        walk.alive["n3"] = d
        walk.alive["h"] = f
        if self.gelu:
            walk.make(act=f, w_down=w)
            walk.drop("act")
        walk.make(d_h=f, w_down=w)
        walk.leave("h")
        walk.make(w_up=w)
        walk.drop("n3")
        walk.make(d_n3=d)
        walk.drop("d_h")
        walk.make(d_a=self.branch, d_x=d)
        walk.drop("d_out", "d_s", "d_n3", "s", "h", "cast_up", "cast_down")
        walk.learn("w_down", "w_up")

    def _blocks(self, walk: Walk) -> None:
        """The feed-forward block op by op."""
        d, f, w = self.d, self.f, self.w
        walk.make(d_act=f, w_down=w)
        walk.drop("act", "d_out", "cast_down")
        walk.learn("w_down")
        walk.make(d_h=f)
        walk.drop("h", "d_act")
        walk.make(d_n3=d, n3=d, w_up=w)
        if not self.pre:
            walk.drop("d_h", "n3", "d_s", "cast_up")
            walk.learn("w_up")
        walk.make(d_a=self.branch, d_x=d)
        walk.drop("d_h", "d_out", "d_s", "d_n3", "n3", "s", "cast_up")
        if self.pre:
            walk.learn("w_up")

    def _cross_attention(self, walk: Walk) -> None:
        """From d_a, the gradient of its branch, to that of its input."""
        d, source, square = self.d, self.source, self.square
        self._out(walk, "o2")
        walk.make(d_q=d, d_kv=self.kv)
        walk.drop("q", "kv", "o2", "d_o")
        walk.make(stacked=self.kv)
        walk.drop("d_kv")
        walk.make(d_memory=source, w_kv=self.w_kv)
        walk.drop("stacked", "d_memory")
        walk.learn("w_kv")
        walk.make(stacked=d)
        walk.drop("d_q")
        walk.make(n2=d, d_n2=d, w_q=square)
        walk.drop("stacked", "n2", "cast2")
        walk.learn("w_q")

    def _out(self, walk: Walk, o: str) -> None:
        """Backward of the output projection of an attention."""
        walk.make(d_o=self.d, w_out=self.square)
        walk.drop("d_a", f"cast_{o}")
        walk.learn("w_out")
        # The projection's operand was the packed form.
        walk.alive[o] = self.d + self.lse

    def _attention(self, walk: Walk) -> None:
        d = self.d
        self._out(walk, "o")
        walk.make(d_qkv=self.qkv)
        walk.drop("qkv", "o", "d_o")
        walk.make(stacked=self.qkv)
        walk.drop("d_qkv")
        walk.make(stacked=self.twice * self.qkv)
        walk.make(stacked=self.qkv, w_qkv=self.w_qkv, d_n=d, **({"n": d} if self.pre else {}))
        walk.drop("stacked", "n", "cast")
        walk.learn("w_qkv")
