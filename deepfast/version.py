"""The package's version, read by setup.py and by `deepfast info`."""

__version__ = "0.1.0"
