"""The options of a stack's DLCL: a preset's, and the user's above them."""

import pytest

from deepfast.nn import TransformerEncoder


@pytest.mark.parametrize(
    ("connection", "given", "expected"),
    [
        ("dlcl", {}, ("average", "pre", True)),
        ("dlcl", {"norm": None}, ("average", None, True)),
        ("dlcl", {"init": "one", "learnable": False}, ("one", "pre", False)),
        ("denseformer", {}, ("identity", None, True)),
        ("denseformer", {"init": "average", "norm": "pre"}, ("average", "pre", True)),
    ],
)
def test_the_user_s_options_stand_above_the_preset_s(connection, given, expected):
    made = TransformerEncoder(2, 12, 3, 20, connection=connection, dlcl=given)
    dlcl = made.connection.dlcl
    assert (dlcl.init, dlcl.norm, dlcl.weight.requires_grad) == expected
    assert ("connection.dlcl.norm_weight" in made.state_dict()) == (dlcl.norm is not None)
