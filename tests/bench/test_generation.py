"""Generation speed over depth, at toy sizes."""

import re
from functools import partial

from bench import generation
from deepfast.clock import on_cpu
from deepfast.measure.clock import interleave
from deepfast.mt.search import beam_search


def test_the_speed_is_that_of_a_beam_search(capsys, threads, monkeypatch):
    """Only the search moves the clock, and models differ in seconds and in tokens."""
    clock, tokens, seen = [0.0], {}, []

    def search(model, source, options):
        config = model.config
        seen.append((tuple(source.shape), options.beam, options.max_length, config.norm))
        clock[0] += 0.01 * config.encoder_layers**2
        found = beam_search(model, source, options)[: 8 * config.encoder_layers]
        depths = f"{config.encoder_layers} + {config.decoder_layers}"
        tokens[depths] = sum(len(best[0].tokens) + 1 for best in found)
        return found

    monkeypatch.setattr(generation, "beam_search", search)
    timed = partial(on_cpu, now=lambda: clock[0])
    monkeypatch.setattr(generation, "interleave", partial(interleave, clock=timed))
    arguments = ["--encoder", "1,2", "--decoder", "1", "--length", "2", "--rounds", "1"]
    with threads(1):
        assert generation.main([*arguments, "--device", "cpu"]) == 0
    # Each of the three models counts its tokens, warms up and is timed.
    assert seen == [((32, 2), 4, 2, "pre")] * 9
    assert tokens["2 + 6"] > tokens["1 + 6"] >= 8
    slow, fast = tokens["2 + 6"] / 0.04, tokens["1 + 6"] / 0.01
    said = capsys.readouterr().out
    assert said.startswith("32 sentences of 2 tokens, beam 4, 128 channels, 2000 pieces, float32")
    rows = re.findall(r"^\| (\d+) \+ (\d+) \| \d+ \| (\d\.\d\d) \|$", said, re.MULTILINE)
    assert [row[:2] for row in rows] == [("1", "6"), ("2", "6"), ("6", "1")]
    assert [rows[0][2], rows[2][2]] == ["1.00", "1.00"]
    assert f"| 1 + 6 | {fast:.0f} | 1.00 |\n| 2 + 6 | {slow:.0f} | {slow / fast:.2f} |\n" in said
