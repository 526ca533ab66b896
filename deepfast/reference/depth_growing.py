"""Depth growing: how a trained model and the layers on top of it are joined.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019, Eq. 1 to 3.
"""

from collections.abc import Callable

from torch import Tensor

Encoder = Callable[[Tensor], Tensor]
Decoder = Callable[[Tensor, Tensor], Tensor]


def depth_growing(
    x: Tensor,
    y: Tensor,
    enc1: Encoder,
    dec1: Decoder,
    enc2: Encoder,
    dec2: Decoder,
    *,
    norms: tuple[Encoder, Encoder] | None = None,
) -> tuple[Tensor, Tensor]:
    """What the shallow and the deep network have before the shared projection, s1 and s2.

    h1 = enc1(x)        s1 = dec1(y, h1)
    h2 = enc2(x + h1)   s2 = dec2(y + s1, h2)

    x: (B, S, D) embedded source. y: (B, T, D) embedded target, shifted by one.
    dec1, dec2: take the target's side and what they attend to.
    norms: of x and of y where they enter the top, as the authors' code has them; None: as the
        paper has it.
    """
    h1 = enc1(x)
    h2 = enc2((norms[0](x) if norms else x) + h1)
    s1 = dec1(y, h1)
    s2 = dec2((norms[1](y) if norms else y) + s1, h2)
    return s1, s2
