"""The part of a depth connection that one stage of a pipeline runs."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deepfast.depth.boundary import DepthHistory
from deepfast.depth.connection import Call, DepthConnection
from deepfast.depth.outside import Begun, later_rows
from deepfast.depth.rows import OutNorm
from deepfast.parallel.edges import Edge

Numbers = list[int | None]


class StageDepth(DepthConnection):
    """A depth connection over the states of one stage, with the weights of the whole one.

    States and rows have numbers of their own here. ``sources`` and ``row_numbers`` give those of
    the whole connection, with None for what is not in it.

        states  those that the edge below carries or, where it carries sums, the input x of the
                stage's first layer (None); then those of the stage's layers
        rows    a state that came in needs no row, except the last; the row with x is x (None);
                then the inputs of the stage's layers, which begin with the sums that came in
        later   after the last state come the rows that cross the edge above: sums, or each of the
                stage's own states alone (None)

    Args:
        whole: the whole connection.
        first, last: the newest states below the stage's first layer and above its last one.
        below, above: the edges; None at the ends of the pipeline.
    """

    def __init__(
        self,
        whole: DepthConnection,
        first: int,
        last: int,
        below: Edge | None,
        above: Edge | None,
    ):
        self.name = whole.name
        given: Numbers = [first]
        if below is not None:
            given = list(below.carried) if below.kind == "states" else [None]
        begins = len(given) - 1
        sources = [*given, *range(first + 1, last + 1)]
        rows: Numbers = [None] * begins + list(range(first, last + 1))
        rows[begins] = None if given[begins] is None else first
        later: Numbers = []
        alone: list[int] = []
        if above is not None and above.kind == "sums":
            later = list(above.carried)
        elif above is not None:
            # Nothing in this stage reads the row with the last state.
            rows[-1] = None
            own = range(0 if below is None else begins + 1, len(sources))
            alone = [k for k in own if sources[k] in above.carried]
            later = [None] * len(alone)
        local = {k: i for i, k in enumerate(sources) if k is not None}
        pattern = []
        for row, k in zip([*rows, *later], [*range(len(rows)), *(alone or later)], strict=True):
            reads = (k,) if row is None else (local[j] for j in whole.pattern[row] if j in local)
            pattern.append(tuple(reads))
        running = [False] * (begins + 1) + [whole.running[k] for k in range(first + 1, last + 1)]
        super().__init__(
            last - first, whole.dim, tuple(pattern), running=tuple(running), norm=whole.norm,
            state_dtype=whole.state_dtype, eps=whole.eps, backend=whole.backend,
        )  # fmt: skip
        self.rows, self.norm_type, self.pass_kind = len(rows), whole.norm_type, whole.pass_kind
        # Of attention residuals: which function makes weights of scores.
        self.score_function = getattr(whole, "score_function", None)
        # Not a child: the parameters keep the names that they have in the whole stack.
        self._whole = (whole,)
        self.begins, self.below, self.above = begins, below, above
        self.sources, self.row_numbers = sources, [*rows, *later]
        # A row that is a state alone.
        self.alone = {len(rows) + i: k for i, k in enumerate(alone)}
        if given[begins] is None:
            self.alone[begins] = begins
        self.begun_rows: tuple[int, ...] = ()
        if below is not None and below.kind == "sums":
            numbers = enumerate(self.row_numbers)
            self.begun_rows = tuple(i for i, row in numbers if row in below.carried)
        self._constants: dict[torch.device, tuple[Tensor, ...]] = {}
        # Of `sum_connection_gradients`: whether the ranks have compared their copies, and whether
        # the gradients are those of all stages.
        self.agreed = self.summed = False

    @property
    def whole(self) -> DepthConnection:
        return self._whole[0]

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def has_norm(self, k: int) -> bool:
        if self.norm == "pre":
            came_in = self.below is not None and k <= self.begins
            return not came_in and self.whole.has_norm(self.sources[k])
        row = self.row_numbers[k]
        return row is not None and self.whole.has_norm(row)

    def _begin(
        self,
        y: Tensor,
        history: DepthHistory,
        begun: Begun | None = None,
        sums: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        super()._begin(y, history, begun, sums)
        if history.token is not None:
            history.token.grad_fn.register_prehook(self._gradients_come)

    def _gradients_come(self, _grads) -> None:
        """Called in backward, before it adds to the gradients of the parameters."""
        self.check_not_summed()
        self.summed = False

    def check_not_summed(self) -> None:
        """Raises where the gradients are those of all stages, and were not cleared since.

        To add to them or to sum them again would count them as often as there are stages.
        """
        # Where the gradients are None, as `zero_grad` leaves them, nothing waits for a GPU.
        grads = (p.grad for p in self.whole.parameters()) if self.summed else ()
        if any(g is not None and bool(local_part(g).any()) for g in grads):
            raise RuntimeError(
                f"{self.name}: expected sum_connection_gradients once for each optimizer step, and "
                "zero_grad after the step, got gradients that are summed over the stages already"
            )

    def begin(self, payload: tuple[Tensor, ...], history: DepthHistory) -> Tensor:
        """Takes what crosses the edge below, (T, D) each, and returns what to push first."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{self.name}: a pipeline stage cannot be compiled as a whole; compile its layers"
            )
        if self.below is None or self.below.kind == "states":
            *given, last = payload
            for y in given:
                self._push(Call(y, history, return_x=False))
            return last
        x, *sums = payload
        if sums:
            total, lse = sums if len(sums) == 2 else (*sums, None)
            begun = Begun(
                self.begun_rows,
                total.detach(),
                None if lse is None else lse.detach(),
                torch.is_grad_enabled() and any(s.requires_grad for s in sums),
            )
            self._begin(x, history, begun, (total, lse))
        return x

    def forward(  # type: ignore[override]
        self,
        y: Tensor,
        history: DepthHistory,
        *,
        residual: Tensor | None = None,
        dropout_p: float = 0.0,
        out_norm: OutNorm | None = None,
        return_x: bool = True,
    ) -> Tensor | tuple[Tensor | None, Tensor]:
        """As `DepthConnection.forward`; None for a row that nothing reads."""
        k = len(history)
        wanted = return_x and (self.row_numbers[k] is not None or k in self.alone)
        return self._push(Call(y, history, None, residual, dropout_p, None, out_norm, wanted))

    def end(
        self, payload: tuple[Tensor, ...], x: Tensor | None, history: DepthHistory
    ) -> tuple[Tensor, ...]:
        """What crosses the edge above, (T, D) each; sums are (R, T, D), their lse (R, T).

        payload: what crossed the edge below.
        x: the row of the last state.
        """
        sums, lse = later_rows(history) if history.state.later else (None, None)
        if self.above.kind == "states":
            passed = () if self.below is None else zip(self.below.carried, payload, strict=True)
            return *(z for k, z in passed if k in self.above.carried), *sums.unbind(0)
        return tuple(t for t in (x, sums, lse) if t is not None)

    def pass_parameters(self) -> tuple[Tensor | None, ...]:
        return self.whole.part_parameters(*self._part())

    def _part(self) -> tuple[Tensor, ...]:
        """The arguments of `DepthConnection.part_parameters`."""
        device = self.device
        if device not in self._constants:
            size = len(self.row_numbers)
            columns = [*self.sources, *[None] * (size - len(self.sources))]
            mask = torch.tensor(
                [[None not in (row, k) for k in columns] for row in self.row_numbers], device=device
            )
            alone = torch.zeros(size, size)
            for row, k in self.alone.items():
                alone[row, k] = 1
            numbers = (torch.tensor([n or 0 for n in ns]) for ns in (self.row_numbers, columns))
            constants = (*(n.to(device) for n in numbers), mask, alone.to(device))
            self._constants[device] = constants
        return self._constants[device]


def local_part(x: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which shares its memory."""
    return x.to_local() if isinstance(x, DTensor) else x
