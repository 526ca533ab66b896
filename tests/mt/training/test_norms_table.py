"""The table of gradient norms: which lines of metrics it shows, and layers without a gradient."""

from deepfast.mt.training.norms_table import lines

ROWS = [
    {"event": "train", "step": 10, "nll": 5.0, "grad_norm": 1.0, "grad_norm_encoder": [0.5, None],
     "grad_norm_decoder": [0.0, 0.25, 2.0], "grad_norm_embedding": 3.0},
    {"event": "valid", "step": 15, "nll": 4.5, "accuracy": 0.125},
    {"event": "train", "step": 20, "nll": 4.0, "grad_norm": 1.0, "grad_norm_encoder": [0.125, None],
     "grad_norm_decoder": [1.0, 0.5, 4.0], "grad_norm_embedding": 3.0},
]  # fmt: skip


def test_a_line_for_each_layer():
    assert lines(ROWS) == [
        "encoder layer          step 10       step 20",
        "1                          0.5         0.125",
        "2                          nan           nan",
        "decoder layer          step 10       step 20",
        "1                            0             1",
        "2                         0.25           0.5",
        "3                            2             4",
    ]
    assert lines(ROWS[:2])[0] == "encoder layer          step 10"
    assert lines([*ROWS, *ROWS, *ROWS])[3] == (
        "decoder layer          step 10       step 20       step 20"
    )
    assert lines([]) == []
