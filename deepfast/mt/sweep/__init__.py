"""Many runs of recipes, each `deepfast mt train` in a process of its own: `deepfast mt sweep`.

`grid` expands keys and values, or the systems of a recipe, to points; `stages` goes from the plan
over the pilots to the runs; `runs` starts processes and reads what they leave; `table` writes what
they found.
"""
