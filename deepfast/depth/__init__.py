"""The depth connection: every layer reads a combination of all layers below it.

The states are z_0 .. z_L, and W has rows 0 .. L. Row l computes the input of layer l + 1 from the
states up to l: ``x_{l+1} = sum_{k<=l} W[l,k] z_k``. In pre-norm the slot of a state holds n_k, the
normalised output of layer k, and a kernel that reads it computes ``z_k = norm_weight[k] n_k +
norm_bias[k]``. Elsewhere z_k is the output itself. Rows are computed in blocks. The picture shows
the block of rows 4 to 7 of a stack with 12 rows. One buffer has a slot for each state, and one
more.

forward     slot     0  1  2  3 |  4  5  6  7 |  8  9 10 11   12
            holds   z0 z1 z2 z3 | z4  .  .  . |  .  .  .  .    .

    Row 4 is the first of its block. One pass over z0 .. z3 computes the partial sums of all
    four rows ahead of time (mix_rows):     P_l = W[l,0] z0 + .. + W[l,3] z3,   l = 4 .. 7
    Each row then adds the states of its own block (boundary_forward):

        push y_4: z4 to its slot            x_5 = P_4 + W[4,4] z4
        push y_5: z5 to its slot            x_6 = P_5 + W[5,4] z4 + W[5,5] z5
        push y_6: z6 to its slot            x_7 = P_6 + W[6,4] z4 + W[6,5] z5 + W[6,6] z6
        push y_7: z7 to its slot            x_8 = P_7 + W[7,4] z4 + .. + W[7,7] z7

backward    slot     0  1  2  3 |  4  5  6  7 |  8  9 10 11   12
            holds   z0 z1 z2 z3 | z4 z5 z6 z7 | --  g8 g9 g10 g11

    g_l is the gradient of x_{l+1}. When backward computes g_l, nothing reads z_{l+1} any more, so
    g_l takes its slot. Backward reaches row 7 of this block first. One pass over g8 .. g11 and
    z4 .. z7 computes what the later rows add to the gradients of all four states (pull_rows):
                                            Q_k = W[8,k] g8 + .. + W[11,k] g11,   k = 4 .. 7
                                            dW[l,k] = <g_l, z_k>,   l = 8 .. 11
    Each boundary then adds the rows of its own block (boundary_backward), with their dW:

        g7 to slot 8                        dz_7 = Q_7 + W[7,7] g7
        g6 to slot 7 (z7 was there)         dz_6 = Q_6 + W[6,6] g6 + W[7,6] g7
        g5 to slot 6                        dz_5 = Q_5 + W[5,5] g5 + W[6,5] g6 + W[7,5] g7
        g4 to slot 5                        dz_4 = Q_4 + W[4,4] g4 + .. + W[7,4] g7

    In the same kernel dz_k passes through the backward of LN_k and of the dropout. The result is
    the gradient of layer k's output.

    Where a norm behind row k has a gradient, its backward needs x_{k+1}. No row is kept: one more
    mix_rows gives the P of the block again, and boundary_backward the row.

So the connection needs one buffer of L + 2 states for forward and backward together, and reads each
state about sqrt(L) times.

Attention residuals have weights of each token: ``p_{l,k} = softmax_k(q_l . RMSNorm(z_k))``. A query
belongs to a row, not to a token, so the score of a state for every later row is known as soon as
the state is, and the same blocks serve. P_l is then the weighted mean over the earlier states with
its largest score and its sum of exponentials, and each row joins its own block's states to it (an
online softmax). Backward computes the weights again from two numbers per row and token. With
``delta_l = <g_l, x_{l+1}>``, ``s = q_l . n_k``, ``p = exp(s - lse_l)`` and
``ds = p (<g_l, z_k> - delta_l)``, summed over the rows l that read state k:

    dz_k = sum p g_l + r_k (sum ds q_l - n_k sum ds s / D),   n_k = z_k r_k
    dq_l = sum over tokens and k of ds n_k

To read the code, follow a push. `DepthConnection.forward` (connection.py), which `DLCL` and
`AttentionResiduals` share, makes a `Push` (push.py), checks it, and begins a pass with the first
one. `boundary` (boundary.py) is the autograd node that runs one boundary forward and backward.
`DepthPass` (depth_pass.py) has the states, P, Q and the gradients, in the order of the picture, and
launches the kernels that it names: `DepthPass.partial` gives P_l, `DepthPass._far_pull` gives Q_k.
`BlockSums` (buffers.py) is the buffer of the P or the Q of a block. `Schedule` (schedule.py) says
which row reads which state in which pass over the states. The subclasses `ConstantPass` (dlcl.py)
and `AttentionPass` (attention_residuals.py) have the operands that weigh the states.
`DepthHistory` (history.py) is the caller's handle on a pass. A push that a compiler traces goes to
traced.py.
"""

from deepfast.depth.attention_residuals import AttentionResiduals
from deepfast.depth.dlcl import DLCL
from deepfast.depth.history import DepthHistory

__all__ = ["DLCL", "AttentionResiduals", "DepthHistory"]
