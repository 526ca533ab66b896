"""One registry of calls of every op: tests, the selfcheck on a GPU and benchmarks all read it.

`case` says what a call is. `ops`, `sentences` and `stacks` make the calls and list those that a
kernel must pass; `sizes` puts the lists together. `check` compares one with float64, and `worker`
is the program that does so for `deepfast selfcheck`.
"""
