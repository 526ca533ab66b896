"""Trains every system at small size on the same sentences and writes one table: `make systems`."""
