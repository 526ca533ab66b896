"""`python -m deepfast`."""

import sys

from deepfast.cli import main

sys.exit(main())
