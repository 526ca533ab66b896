"""Depth growing: how the layers on top of a trained model are joined to it.

Wu et al., Depth Growing for Neural Machine Translation, ACL 2019, Eq. 1 to 3.
"""

from torch import Tensor


def depth_growing(
    x: Tensor, y: Tensor, enc1, dec1, enc2, dec2, *, norms=None
) -> tuple[Tensor, Tensor]:
    """The states s1 of the shallow and s2 of the deep network, before the shared projection.

    h1 = enc1(x)        s1 = dec1(y, h1)
    h2 = enc2(x + h1)   s2 = dec2(y + s1, h2)

    x: (B, S, D) embedded source. y: (B, T, D) embedded target, shifted by one.
    dec1, dec2: of the target's states and of the encoder's output that they attend to.
    norms: normalise x and y where they enter the top, as the authors' code does; None: as in the
        paper.
    """
    h1 = enc1(x)
    h2 = enc2((norms[0](x) if norms else x) + h1)
    s1 = dec1(y, h1)
    s2 = dec2((norms[1](y) if norms else y) + s1, h2)
    return s1, s2
