"""What the sweep measures, and what it refuses to start."""

import math

import pytest
import torch

from deepfast.measure import compiled as compiled_module
from deepfast.measure.encoders import VARIANTS, Case, PeerEncoder
from deepfast.measure.mixing import mixing
from deepfast.measure.results import seconds, size, verdict
from deepfast.measure.rows import (
    DOES_NOT_FIT,
    MEASURED,
    NOT_MEASURED,
    Row,
)
from deepfast.measure.settings import (
    SHARES,
    Budget,
    Deadline,
    OutOfTime,
    Settings,
)
from deepfast.measure.sweep import connection_cost, sweep
from deepfast.nn import TransformerEncoder

NO_LIMIT = Deadline(math.inf)


def quiet(line):
    pass


class LateDeadline(Deadline):
    """Time is up at the n-th look, wherever that is."""

    def __init__(self, looks):
        super().__init__(60)
        self.looks = looks

    def check(self):
        self.looks -= 1
        if self.looks < 0:
            raise OutOfTime("stopped after 60 s, its time budget")


# Four layers look five times forward and five times backward.
@pytest.mark.parametrize("looks", [0, 3, 7])
def test_a_form_that_takes_too_long_is_stopped(tiny, looks):
    case = Case(tiny, 4, LateDeadline(looks))
    with pytest.raises(OutOfTime):
        case.step("stack and sum")
    case.forget_gradients()
    assert case.step("deepfast").isfinite()


def test_a_stopped_run_is_a_row(tiny, monkeypatch):
    def check(deadline):
        if deadline.seconds < math.inf:
            raise OutOfTime("stopped after 60 s, its time budget")

    monkeypatch.setattr(Deadline, "check", check)
    rows = {(row.depth, row.variant): row for row in sweep(tiny, Deadline(30), quiet)}
    row = rows[4, "stack and sum"]
    assert (row.status, row.peak_bytes) == (NOT_MEASURED, None)
    assert row.note == "stopped after 60 s, its time budget"
    assert rows[4, "deepfast"].status == MEASURED
    alone = {row.variant: row for row in mixing(tiny, Deadline(30), [], quiet)[0]}
    assert alone["stack and sum"].note == "stopped after 60 s, its time budget"


def test_the_connection_s_cost_is_what_the_plain_stack_does_not_take():
    rows = [
        Row(variant=v, depth=10, tokens=1, seconds=[s])
        for v, s in (("plain residual", 1.0), ("stack and sum", 3.0))
    ]
    assert connection_cost(rows, "stack and sum") == pytest.approx(0.02)
    assert connection_cost(rows, "loop of adds") is None


def test_all_dlcl_variants_compute_the_same_and_residual_does_not(tiny):
    case = Case(tiny, 4, NO_LIMIT)
    losses = {v: case.step(v).item() for v in VARIANTS}
    plain = losses.pop("plain residual")
    assert losses == pytest.approx(dict.fromkeys(losses, losses["stack and sum"]), rel=1e-5)
    assert abs(plain - losses["deepfast"]) > 1e-4


def test_variants_share_every_parameter(tiny):
    case = Case(tiny, 3, NO_LIMIT)
    own = {id(p) for p in case.encoder.parameters()}
    for model in case.models.values():
        assert {id(p) for p in model.parameters()} <= own


def test_a_peer_needs_pre_norm_dlcl_without_dropout():
    with pytest.raises(ValueError, match="connection='dlcl'"):
        PeerEncoder(TransformerEncoder(1, 8, 2, 8, connection="residual"), None)
    with pytest.raises(ValueError, match=r"dropout 0, got 0\.1"):
        PeerEncoder(TransformerEncoder(1, 8, 2, 8), None)


def test_parameters_are_the_same_after_a_sweep_s_adam(tiny, monkeypatch):
    cases = []
    monkeypatch.setattr(
        "deepfast.measure.sweep.Case", lambda *args: cases.append(Case(*args)) or cases[-1]
    )
    sweep(tiny, Deadline(60), quiet)
    for case in cases:
        fresh = dict(Case(tiny, case.depth, NO_LIMIT).encoder.named_parameters())
        for name, parameter in case.encoder.named_parameters():
            torch.testing.assert_close(parameter, fresh[name], rtol=0, atol=0)


def test_no_time_no_run(tiny):
    rows = sweep(tiny, Deadline(0), quiet)
    assert len(rows) == 3 * len(VARIANTS)
    assert {row.status for row in rows} == {NOT_MEASURED}
    assert rows[0].note == "0 s of the time budget were left"


def test_the_predicted_memory_is_not_below_the_measured_one(tiny):
    rows = [r for r in sweep(tiny, Deadline(60), quiet) if r.variant == "stack and sum"]
    for row in rows:
        assert row.status == MEASURED
        assert row.peak_bytes <= row.predicted_peak_bytes <= 1.5 * row.peak_bytes


def test_memory_that_is_not_there_is_not_taken(tiny):
    tiny.memory_bytes = 100_000
    rows = mixing(tiny, Deadline(30), [], quiet)[0]
    by_form = {row.variant: row.status for row in rows}
    assert by_form["stack and sum"] == DOES_NOT_FIT
    assert by_form["deepfast"] == MEASURED


def test_a_child_that_takes_too_long_is_ended(tiny):
    row = Row(variant="loop of adds, compiled", depth=2, tokens=1)
    stopped = compiled_module._measure(row, tiny, 0.3)
    assert row.status == NOT_MEASURED
    assert row.note.startswith("did not finish in")
    assert "2 layers did not finish" in stopped


def test_a_child_that_fails_says_why():
    answer, why = compiled_module._child("{}}", 60)
    assert answer is None
    assert why.startswith("failed: ")
    assert "JSONDecodeError" in why


def test_without_time_no_depth_is_compiled(tiny):
    rows = compiled_module.compiled(tiny, Deadline(0), quiet)
    assert [row.depth for row in rows] == list(tiny.depths)
    assert {row.status for row in rows} == {NOT_MEASURED}


def test_the_compiled_sum_is_the_sum(tiny, monkeypatch):
    # Eager stands in for the compiler: what is tested is the connection around it.
    monkeypatch.setattr(
        compiled_module, "_weighted_sum", compiled_module._weighted_sum._torchdynamo_orig_callable
    )
    case = Case(tiny, 3, NO_LIMIT)
    case.models["compiled"] = PeerEncoder(case.encoder, compiled_module.CompiledLoop)
    assert case.step("compiled").item() == pytest.approx(case.step("deepfast").item(), rel=1e-5)


def test_a_budget_hands_on_what_is_left():
    budget = Budget(106, frozenset({"compiled"}))
    whole = budget.left
    first = budget.start("sweep")
    assert first.seconds == pytest.approx(
        whole * SHARES["sweep"] / (1 - SHARES["compiled"]), rel=0.01
    )
    for part in ("mixing", "memory", "training", "twin"):
        budget.start(part)
    # Nothing was spent: the last part may take all of it.
    assert budget.start("translation").seconds == pytest.approx(whole, rel=0.01)


def test_numbers_are_short():
    assert [seconds(v) for v in (None, 0.00123, 0.5, 2.345, 41.23)] == [
        "", "1.23 ms", "500 ms", "2.35 s", "41.2 s",
    ]  # fmt: skip
    assert [size(v) for v in (1 << 20, 3 << 29, 13 << 30)] == ["1 MiB", "1.50 GiB", "13.0 GiB"]


def test_settings_refuse_what_cannot_be_measured():
    with pytest.raises(ValueError, match="--depths"):
        Settings(depths=())
    with pytest.raises(ValueError, match="--memory-gib"):
        Settings(memory_bytes=0)
    assert Settings(depths=(30, 6, 30)).depths == (6, 30)


@pytest.mark.parametrize(
    ("ours", "twin", "says"),
    [(2.0, 4.4, "little more than token frequencies"), (2.0, 3.0, "but later"),
     (3.0, 2.0, "not behind")],
)  # fmt: skip
def test_the_verdict_follows_the_numbers(ours, twin, says):
    def run(nll):
        return {"steps": 100, "curve": {"dev": [[50, 5.0, 1.0], [100, nll, 2.0]]}}

    training = {"unigram_nll": 4.5, "runs": {"dlcl": run(ours), "twin": run(twin)}}
    assert says in verdict(training)
