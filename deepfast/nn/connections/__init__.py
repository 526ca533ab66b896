"""How the layers of a stack are joined."""
