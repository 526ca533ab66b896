"""Benchmarks, tests and checks that need a GPU: `python -m bench.gpu`."""

import os
import sys

if "--dry-run" in sys.argv:
    # Triton reads it when it is imported, which torch does.
    os.environ["TRITON_INTERPRET"] = "1"
