"""Every system trained small on the same sentences: `make systems`, one table."""
