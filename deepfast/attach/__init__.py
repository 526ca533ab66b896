"""Depth connections in models that other people wrote, see `connect`.

The forward of a *parent* loops over its list of layers. Between two layers the connection must push
the output of a layer, or what it has added, and give the next layer its row:

    parent's forward        hooks of the `Attachment` open a `Pass` before it and close it after it
    for layer in layers     the list, whose class is swapped, gives a stand-in for each layer
    x = layer(x)            the stand-in runs the layer (`call_layer`), and pushes outside of the
                            layer's call, which may be checkpointed, compiled, sharded or hooked
      norm1(x) .. attn(..)  with ``sublayers=`` hooks on these modules ask the `LayerRun`: a later
      norm2(h) .. mlp(..)   norm pushes what the sublayer before it has added, and gets the row

A layer reads r times: once, or once for each of its ``sublayers=``. Sublayer s of layer k reads row
r k + s. Three places push:

    state 0                     the stand-in of layer 0, before the layer runs
    state r k + s, 0 < s < r    the norm of sublayer s of layer k, whose input becomes the row
    state r (k + 1)             the stand-in of layer k, which returns the row as the output

The `Settings` of a connected parent hold its `Current`: the pass and the `LayerRun` of this thread.
The list and the hooks look there. Outside of a pass they find nothing and change nothing.

To read the code, begin with `connect` (parent.py). `Attachment`, the list and `call_layer` are in
loop.py, the pass and its pushes in passes.py, and the hooks of sublayers in layer_run.py: `Read`
before a norm and `Take` behind the last module. sublayers.py finds these modules. additive.py adds
reads to a layer's own sum, attnres.py reads checkpoints of other packages, and pretrained.py makes
connected classes of transformers.

Backward may run a layer again. A push whose state exists computes the row again. The rerun is

    the whole call of the layer, under ``recompute=`` or where a loop checkpoints its calls: it
    makes a new `LayerRun`;

    the layer without its stand-in, where it checkpoints itself or its sublayers as layers of
    transformers do: the first norm to run gets the tensor that it got in forward, on which `Read`
    has left the pass and the number of the layer. With these it begins a `LayerRun`. Later norms,
    whose inputs are new tensors, go on with it. It ends with backward.
"""

from deepfast.attach.parent import connect, disconnect
from deepfast.attach.pretrained import connected

__all__ = ["connect", "connected", "disconnect"]
