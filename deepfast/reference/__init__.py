"""The specification of every op in plain PyTorch: short, slow, also in float64."""
