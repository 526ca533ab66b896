"""Run by test_ranks.py under torchrun: trains one recipe after the other.

torchrun --nproc-per-node 2 rank_runs.py first.yaml second.yaml ...
"""

import sys

from deepfast.mt.training import load_recipe, train

if __name__ == "__main__":
    for path in sys.argv[1:]:
        train(load_recipe(path), quiet=True)
