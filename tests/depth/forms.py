"""Forms of DLCL: where its norms are, of which kind, and the shape of its weights."""

NORMS = ["pre", "post", "pre rms", "post rms", None]
WEIGHTS = ["scalar", "group", "vector"]


def normed(norm):
    """The arguments for one of NORMS."""
    where, _, kind = (norm or "").partition(" ")
    return {"norm": where or None, "norm_kind": kind or "layer"}


def form(norm, weight, dim):
    groups = max(1, min(5, dim - 1)) if weight == "group" else None
    return normed(norm) | {"weight": weight, "groups": groups}
