"""Generation speed over depth, at toy sizes."""

import re

from bench import generation


def test_a_line_for_every_depth(capsys, threads):
    with threads(1):
        arguments = ["--encoder", "1,2", "--decoder", "1", "--length", "2", "--rounds", "1"]
        assert generation.main([*arguments, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("32 sentences of 2 tokens, beam 4, 128 channels, 2000 pieces, float32")
    rows = re.findall(r"^\| (\d+) \+ (\d+) \| (\d+) \| (\d\.\d\d) \|$", said, re.MULTILINE)
    assert [row[:2] for row in rows] == [("1", "6"), ("2", "6"), ("6", "1")]
    assert [rows[0][3], rows[2][3]] == ["1.00", "1.00"]
    assert all(int(row[2]) > 0 for row in rows)
