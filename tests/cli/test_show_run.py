"""`deepfast mt show-run`: what it reads from the lines of metrics, the table and the picture."""

import json
import math

import pytest

from deepfast.cli import main
from deepfast.measure.run_picture import curves, side_norms, table

ROWS = [
    {"event": "train", "step": 10, "nll": 5.0, "grad_norm": 1.0, "grad_norm_encoder": [0.5, None],
     "grad_norm_decoder": [0.0, 0.25, 2.0], "grad_norm_embedding": 3.0},
    {"event": "valid", "step": 15, "nll": 4.5, "accuracy": 0.125},
    {"event": "train", "step": 20, "nll": 4.0, "grad_norm": 1.0, "grad_norm_encoder": [0.125, None],
     "grad_norm_decoder": [1.0, 0.5, 4.0], "grad_norm_embedding": 3.0},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    # Killed while it wrote a line.
    (tmp_path / "metrics.jsonl").write_text(text + '{"event": "tr')
    return tmp_path


def test_curves_and_norms():
    assert curves(ROWS, "nll") == {"train": [(10, 5.0), (20, 4.0)], "dev": [(15, 4.5)]}
    assert curves(ROWS, "accuracy") == {"dev": [(15, 0.125)]}
    encoder, decoder = side_norms(ROWS)
    assert (encoder.name, encoder.steps) == ("encoder", [10, 20])
    assert [norms[0] for norms in encoder.norms] == [0.5, 0.125]
    assert all(math.isnan(norms[1]) for norms in encoder.norms)
    assert (decoder.name, decoder.norms) == ("decoder", [[0.0, 0.25, 2.0], [1.0, 0.5, 4.0]])
    assert table(decoder) == [
        "decoder layer          step 10       step 20",
        "1                            0             1",
        "2                         0.25           0.5",
        "3                            2             4",
    ]


def test_the_table_and_a_picture(folder, capsys):
    picture = folder / "run.svg"
    assert main(["mt", "show-run", str(folder), "--output", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "encoder layer          step 10       step 20" in said
    assert said.endswith(f"drawn: {picture}\n")
    assert "gradient norm by layer: decoder" in picture.read_text()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"step": "x"}, "expected an integer for step"),
        ({"step": math.nan}, "expected an integer for step"),
        ({"nll": "x"}, "expected a number or null for nll"),
        ({"nll": 10**400}, "expected a number or null for nll"),
        ({"accuracy": [1]}, "expected a number or null for accuracy"),
        ({"nll": math.nan}, "expected a number or null for nll"),
        ({"grad_norm_decoder": [1.0]}, "expected norms of 3 layers for grad_norm_decoder"),
        ({"grad_norm_encoder": [-1.0, 1.0]}, "expected norms of 2 layers for grad_norm_encoder"),
        ({"grad_norm_encoder": [[1], {}]}, "expected norms of 2 layers for grad_norm_encoder"),
        ({"grad_norm_x": []}, "expected norms of the layers for grad_norm_x"),
    ],
)
def test_lines_that_no_run_has_written(folder, capsys, change, expected):
    rows = [*ROWS, ROWS[-1] | change]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["mt", "show-run", str(folder)]) == 1
    assert f"deepfast mt show-run: metrics.jsonl: {expected}" in capsys.readouterr().err


def test_lines_without_values_to_draw(folder, tmp_path, capsys):
    (folder / "metrics.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    assert main(["mt", "show-run", str(folder)]) == 1
    assert "expected a run with steps, got none yet" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text('{"event": "train", "step": 1}\n')
    assert main(["mt", "show-run", str(folder), "--output", str(tmp_path / "run.svg")]) == 1
    assert "expected lines of metrics with values to draw, got none" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_bytes(bytes(range(256)))
    assert main(["mt", "show-run", str(folder)]) == 1
    assert "expected lines of metrics, got other bytes" in capsys.readouterr().err
