"""Depth connections in models that other people wrote, see `connect`.

The forward of a *parent* loops over its list of layers. Between two layers the connection must push
what a layer has added and give the next layer its row. This happens as follows:

    parent's forward        hooks of the `Attachment` open a `Pass` before it and close it after it
    for layer in layers     the list, whose class is swapped, gives a stand-in for each layer
    x = layer(x)            the stand-in runs the layer (`call_layer`), and pushes outside of the
                            layer's call, which may be checkpointed, compiled, sharded or hooked
      norm1(x) .. attn(..)  with ``sublayers=`` hooks on these modules ask the `LayerRun`: the input
      norm2(h) .. mlp(..)   of each later norm pushes what the sublayer before it has added

``r`` reads a layer, one for each sublayer, or one: state 0 is the input of layer 0, sublayer s of
layer k reads row ``r k + s``, and what it adds is state ``r k + s + 1``. Who pushes which state:

    state 0                     the stand-in of layer 0, before the layer runs
    state r k + s, 0 < s < r    the norm of sublayer s of layer k, whose input becomes the row
    state r (k + 1)             the stand-in of layer k; it returns the row in place of the output

What runs stands in one object, the `Running` of the connection: the pass and the `LayerRun` of this
thread. The hooks hold it, and the list finds it, so that outside of a pass they do nothing.

Backward may run a layer again. Each push has its index, so a push of a state that exists computes
the row again. Who repeats it:

    connect(recompute=...), or a loop that checkpoints its calls
        the whole call of the layer, with a new `LayerRun`
    a layer that checkpoints itself or its sublayers, as those of transformers do
        the layer without its stand-in. Its first norm to run gets the tensor that it got in
        forward, on which `Read` has left the pass and the number of the layer. From these it
        begins a `LayerRun` again; later norms, whose inputs are new tensors, go on with it.
"""

from deepfast.attach.parent import connect, disconnect
from deepfast.attach.pretrained import connected

__all__ = ["connect", "connected", "disconnect"]
