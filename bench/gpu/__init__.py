"""`make gpu`: tests on a GPU, then benchmarks beside other packages in the same run."""
