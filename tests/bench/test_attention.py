"""The comparison with SDPA, at toy sizes."""

import re

from bench import attention


def test_a_line_for_each_length(capsys, threads, monkeypatch):
    monkeypatch.setattr(attention, "CASES", {attention.RAGGED: None, "2 x 3": [3, 3]})
    with threads(1):
        assert attention.main(["--width", "8", "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^\| (\d+ x [^|]*) \|(?: \d+\.\d\d \|){4}$", said, re.MULTILINE)
    assert rows == [attention.RAGGED, "2 x 3"]
