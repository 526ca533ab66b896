"""Initial values of parameters, set by the functions of torch.nn.init alone.

Libraries that load weights replace these functions, so that a parameter which has been loaded keeps
its values. transformers marks such a parameter with an attribute.
"""

from torch import Tensor


def part(parameter: Tensor, index) -> Tensor:
    """``parameter[index]`` as a view to initialise. It has the attributes of the parameter."""
    view = parameter.detach()[index]
    view.__dict__.update(parameter.__dict__)
    return view
