"""What a run saves to resume from, and what it does where that is damaged, copied or cut short."""

import re
from pathlib import Path

import pytest

from deepfast.mt.training import NotFiniteError, train


@pytest.mark.parametrize("step", [8, 12])
def test_a_step_that_leaves_weights_that_are_not_finite_is_not_saved(make_recipe, step):
    """Also where it is the last one, so that no later loss tells."""
    recipe = make_recipe({"optim.restart_step": step - 1, "optim.restart_lr": 1e39})
    with pytest.raises(NotFiniteError) as caught:
        train(recipe, quiet=True)
    last = f"step-{step - 4:08d}.pt"
    assert re.fullmatch(
        rf"step {step}: the parameter embedding\.weight is not finite after the update; last "
        rf"checkpoint: .*/{last}",
        str(caught.value),
    )
    names = sorted(path.name for path in Path(recipe.output).glob("*.pt"))
    assert names[-1] == last
    assert "average.pt" not in names
