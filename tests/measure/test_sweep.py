"""The sweep: variants that compute the same, and variants that do not fit the free memory."""

import pytest

from deepfast.measure import turns
from deepfast.measure.encoders import VARIANTS, FormEncoder, StepCase
from deepfast.measure.results import seconds, size, verdict
from deepfast.measure.settings import DEFAULT, FULL, QUICK
from deepfast.measure.sweep import mixing, sweep
from deepfast.nn import TransformerEncoder


def test_all_dlcl_variants_compute_the_same_and_residual_does_not(tiny):
    case = StepCase(tiny, 4)
    losses = {v: case.step(v)[0].item() for v in VARIANTS}
    plain = losses.pop("plain residual")
    assert losses == pytest.approx(dict.fromkeys(losses, losses["stack and sum"]), rel=1e-5)
    assert abs(plain - losses["deepfast"]) > 1e-4


def test_variants_share_every_parameter_and_a_run_leaves_no_gradients(tiny):
    case = StepCase(tiny, 3)
    own = {id(p) for p in case.encoder.parameters()}
    for name, model in case.models.items():
        assert {id(p) for p in model.parameters()} <= own
        case.run(name)
    assert all(p.grad is None for p in case.encoder.parameters())


def test_a_form_needs_pre_norm_dlcl_without_dropout():
    with pytest.raises(ValueError, match="connection='dlcl'"):
        FormEncoder(TransformerEncoder(1, 8, 2, 8, connection="residual"), None)
    with pytest.raises(ValueError, match=r"dropout 0, got 0\.1"):
        FormEncoder(TransformerEncoder(1, 8, 2, 8), None)


@pytest.mark.parametrize("jobs", [sweep, mixing])
def test_memory_that_is_not_there_is_not_taken(tiny, finish, monkeypatch, jobs):
    monkeypatch.setattr(turns, "free_bytes", lambda: turns.GIB + 50_000)
    rows = []
    finish(jobs(tiny, rows))
    for row in rows:
        if row.variant == "stack and sum":
            assert row.note.startswith("does not fit: needs ")
            assert row.peak_bytes is row.median is None
        else:
            assert row.note is None
            assert row.median > 0


def test_variants_take_turns(tiny):
    labels = [job.label for job in sweep(tiny, [])]
    pair = [f"2 layers, {v}: time" for v in VARIANTS[:2]]
    start = labels.index(pair[0])
    assert labels[start : start + 7] == [*(f"2 layers, {v}: time" for v in VARIANTS), *pair]


@pytest.mark.parametrize("settings", [DEFAULT, FULL, QUICK], ids=["default", "full", "quick"])
def test_every_setting_measures_the_headline_rows(settings):
    assert settings.policy_depth in settings.depths
    assert settings is QUICK or settings.depths == (6, 30, 60, 100)
    assert settings is not FULL or (settings.tokens, settings.dim) == (2048, 256)


def test_numbers_are_short():
    assert [seconds(v) for v in (None, 0.00123, 0.5, 2.345, 41.23)] == [
        "", "1.23 ms", "500 ms", "2.35 s", "41.2 s",
    ]  # fmt: skip
    assert [size(v) for v in (1 << 20, 3 << 29, 13 << 30)] == ["1 MiB", "1.50 GiB", "13.0 GiB"]


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
