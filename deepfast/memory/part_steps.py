"""The steps of a layer whose parts each push their branch and read the depth connection.

Names of tensors as in `deepfast.memory.steps`. Each part goes from its own n to its branch. There
are no sums between the parts: the boundary writes a branch into the buffer of states, and computes
the next n. No part keeps its n: backward recomputes it from the states. Policies that recompute h
run the feed-forward block again from n3.
"""

from deepfast.memory.steps import Layer, Step, Walk


class PartLayer(Layer):
    """A layer that a stack calls part by part."""

    def __init__(self, sizes, policy: str, decoder: bool):
        super().__init__(sizes, policy, decoder)
        self.again = policy != "none"
        """Whether the feed-forward block runs again in backward."""

    # ---- what is kept --------------------------------------------------------------------------

    def saved(self) -> dict[str, int]:
        d = self.d
        names = {"qkv": self.qkv, "o": self.twice * d + self.lse}
        if self.decoder:
            names |= {"q": d, "kv": self.kv, "o2": self.twice * d + self.lse}
        # ReLU saves its result alone.
        return names | {"act": self.f} | ({"h": self.f} if self.gelu else {})

    def kept(self) -> dict[str, int]:
        if self.rerun:
            return {}
        without = {"act", "h"} if self.again else set()
        return {name: size for name, size in self.saved().items() if name not in without}

    def cached(self) -> dict[str, int]:
        return self.copies()

    def held(self) -> dict[str, int]:
        if self.rerun:
            return {}
        again = ("cast_up", "cast_down") if self.again else ()
        return {name: size for name, size in self.copies().items() if name not in again}

    # ---- forward -------------------------------------------------------------------------------

    def forward(self) -> list[Step]:
        walk = Walk(self.kept() | self.cached(), n=self.d, **self.copies())
        self._attend(walk)
        walk.make(a=self.d)
        walk.leave("qkv", "o")
        self._between(walk, "a", "n", "n2" if self.decoder else "n3")
        if self.decoder:
            self._attend_encoded(walk)
            walk.make(c=self.d)
            walk.leave("q", "kv", "o2")
            self._between(walk, "c", "n2", "n3")
        self._feed(walk)
        walk.make(out=self.d)
        walk.leave("h", "act")
        walk.part += 1
        walk.make(next=self.d)
        return walk.steps

    def _between(self, walk: Walk, branch: str, below: str, above: str) -> None:
        """The boundary between two parts."""
        walk.part += 1
        walk.make(**{above: self.d})
        walk.leave(branch, below)

    def _feed(self, walk: Walk) -> None:
        walk.make(h=self.f)
        walk.make(act=self.f)
        if not self.gelu:
            walk.drop("h")

    # ---- backward ------------------------------------------------------------------------------

    def backward(self) -> list[Step]:
        d, f, w = self.d, self.f, self.w
        walk = Walk(self.saved() | self.copies(), **self.kept(), **self.held())
        walk.low = self.sizes.dtype == "bfloat16"
        walk.alive["d_out"], walk.part = d, 2 if self.decoder else 1
        if self.again:
            self._again(walk, "n3", "cast_up", "cast_down")
            self._feed(walk)
        walk.make(d_act=f, w_down=w)
        walk.drop("d_out", "cast_down", *(["act"] if self.gelu else []))
        walk.learn("w_down")
        walk.make(d_h=f)
        walk.drop("h", "act", "d_act")
        walk.make(n3=d, d_n3=d, w_up=w)
        walk.drop("d_h", "n3", "cast_up")
        walk.learn("w_up")
        self._pushed(walk, "d_n3")
        if self.decoder:
            if self.rerun:
                self._again(walk, "n2", "cast2", "cast_o2")
                self._attend_encoded(walk)
            self._cross_attention(walk)
            self._pushed(walk, "d_n2")
        if self.rerun:
            self._again(walk, "n", "cast", "cast_o")
            self._attend(walk)
        self._attention(walk)
        return walk.steps

    def _pushed(self, walk: Walk, above: str) -> None:
        """Backward of the boundary between two parts."""
        walk.part -= 1
        walk.make(d_a=self.d)
        walk.drop(above)

    def _again(self, walk: Walk, n: str, *casts: str) -> None:
        """The input of a part that runs again, and its copies of weights."""
        copies = self.copies()
        walk.make(**{n: self.d}, **{name: copies[name] for name in casts if name in copies})
