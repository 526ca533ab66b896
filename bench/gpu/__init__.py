"""`make gpu`: tests on a GPU, then benchmarks against peers in the same run."""
