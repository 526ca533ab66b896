"""Measurements: encoders of several depths against other ways to compute DLCL, and a report."""
