"""`python -m deepfast.cli`."""

import sys

from deepfast.cli import main

sys.exit(main())
