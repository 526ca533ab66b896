"""The commands of `deepfast mt`, which train and use translation models."""
