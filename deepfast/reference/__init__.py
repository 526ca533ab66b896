"""The specification of every op in plain PyTorch: short, slow, float64-capable."""
