"""Measurements: encoders of several depths beside other ways to compute DLCL, and a report."""
