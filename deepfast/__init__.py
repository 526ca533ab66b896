"""deepfast: very deep Transformers whose layers read all layers below them, at full speed.

deepfast.ops      fused ops with autograd
deepfast.nn       DLCL, DepthHistory, Transformer layers and stacks
deepfast.connect  puts a depth connection into a model that you already have
deepfast.patch    fused norms in a model that you already have
deepfast.causal_lm_loss  the loss of a causal language model of Hugging Face without its logits
deepfast.integrations  the layer histories of fairseq's forks
deepfast.memory   the memory of a training step, counted and planned
deepfast.mt       the translation toolkit: data, models, training, search
"""

import importlib
from typing import TYPE_CHECKING

from deepfast.version import __version__

if TYPE_CHECKING:
    from deepfast import integrations, memory, mt, nn, ops
    from deepfast.attach import connect, connected, disconnect
    from deepfast.attach.attnres import attnres_options, attnres_state_dict, load_attnres
    from deepfast.integrations.causal_lm import causal_lm_loss
    from deepfast.integrations.patch import patch
    from deepfast.nn.parameter_groups import parameter_groups

FUNCTIONS = {
    "attnres_options": "attach.attnres",
    "attnres_state_dict": "attach.attnres",
    "causal_lm_loss": "integrations.causal_lm",
    "connect": "attach",
    "connected": "attach",
    "disconnect": "attach",
    "load_attnres": "attach.attnres",
    "parameter_groups": "nn.parameter_groups",
    "patch": "integrations.patch",
}
"""Name -> the module that has it."""
__all__ = [
    "__version__",
    "attnres_options",
    "attnres_state_dict",
    "causal_lm_loss",
    "connect",
    "connected",
    "disconnect",
    "integrations",
    "load_attnres",
    "memory",
    "mt",
    "nn",
    "ops",
    "parameter_groups",
    "patch",
]


def __getattr__(name: str):
    # Imported on first use: torch takes seconds to import, and no part needs all the others.
    if name in FUNCTIONS:
        return getattr(importlib.import_module(f"deepfast.{FUNCTIONS[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"deepfast.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
