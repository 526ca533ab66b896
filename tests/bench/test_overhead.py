"""`python -m bench.overhead` says what it counts, in which unit."""

from bench import overhead


def test_numbers_have_their_unit(monkeypatch, capsys):
    monkeypatch.setattr(overhead, "measure", lambda kind: {"forward, Python alone": 7.5})
    monkeypatch.setattr(overhead, "keep_memory", lambda: None)
    monkeypatch.setattr(overhead.torch, "set_num_threads", lambda count: None)
    assert overhead.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{kind} boundary: forward, Python alone 7.5 us" for kind in ("plain", "full")]
