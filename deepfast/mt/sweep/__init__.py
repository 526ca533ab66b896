"""Many runs of recipes, each in a process of its own: `deepfast mt sweep`.

`grid` expands keys and values, or the systems of a recipe, to points; `stages` goes from the plan
over pilots to runs; `plan` measures what they take, `runs` starts the runs and keeps their results,
`one` is the process of one run, `table` writes what they found.
"""
