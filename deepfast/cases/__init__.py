"""One registry of calls of every op: tests, the proof on a GPU and benchmarks all read it.

`case` says what a call is, `ops` and `stacks` make the calls, and `sizes` lists those that a kernel
is held to and those that are timed. `check` holds one to float64, and `worker` is the program that
does so for `deepfast prove`.
"""
