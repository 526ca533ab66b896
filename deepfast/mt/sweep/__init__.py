"""Many runs of recipes, each in a process of its own: `deepfast mt sweep`, `make systems`.

`grid` expands keys and values to points, `runs` starts the runs and keeps their results, `one` is
the process of one run, `table` writes what they found.
"""
