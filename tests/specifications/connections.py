"""The depth connections in plain torch: each row from everything that was pushed."""

import torch
import torch.nn.functional as F

from deepfast.nn import AttentionResiduals
from deepfast.reference.dropout import add_dropout
from deepfast.reference.layer_norm import rms_norm
from tests.specifications import attention_residuals as published


def applied_weight(m, weight):
    """W as the design defines it: the pattern, the softmax, the groups. Independent of `DLCL`."""
    rows = weight.shape[0]
    row, k = torch.arange(rows).view(-1, 1), torch.arange(rows).view(1, -1)
    age = row - k
    mask = (age >= 0) & (age < (m.window or rows)) & (age % m.dilation == 0)
    mask &= (row % m.period == 0) | (age == 0)
    mask = mask.view(rows, rows, *(1,) * (weight.dim() - 2))
    if m.softmax:
        weight = weight.masked_fill(~mask, -torch.inf).softmax(1)
    weight = weight.masked_fill(~mask, 0)
    return weight[..., torch.arange(m.dim) % m.groups] if m.groups else weight


def attention_row(m, v, row):
    """Row ``row`` of the attention residuals m over what was pushed, by the published equations."""
    query = m.query * m.scale if m.norm_weight is None else m.query * m.scale * m.norm_weight
    if m.bias is None and m.window is None:
        if m.block is None:
            return published.full(v, query, row, m.eps)
        return published.block(v, query, row, m.reads * m.block, m.eps)
    # Of running sums each block's last is read, of all states those in the window.
    states = []
    for x, continues in zip(v[: row + 1], m.continues, strict=False):
        states.append(x + states[-1] if continues else x)
    if m.bias is None:
        return published.attend(states[-m.window :], query[row], m.eps)
    total = 0
    for k in m.pattern[row]:
        n, _ = rms_norm(states[k], eps=m.eps)
        total += ((n * query[row]).sum(-1, keepdim=True) + m.bias[row, k]).relu() * states[k]
    return total


def normalised(x, weight, bias, eps, rms):
    if rms:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


class PlainHistory:
    """In place of a history: keeps what is pushed, and computes every row from all of it.

    dtype: of the arithmetic; None for that of the parameters.
    """

    def __init__(self, m, dtype=None):
        self.m, self.pushed = m, []
        self.p = {name: p if dtype is None else p.to(dtype) for name, p in m.named_parameters()}
        if not isinstance(m, AttentionResiduals):
            self.w = applied_weight(m, self.p["weight"])

    def norm(self, x, k):
        m, weight, bias = self.m, self.p["norm_weight"], self.p.get("norm_bias")
        if k == 0 and not m.normalize_embedding:
            return x
        return normalised(x, weight[k], None if bias is None else bias[k], m.eps, bias is None)

    def push(
        self, y, *, index=None, residual=None, dropout_p=0.0, seed=0, out_norm=None, return_x=True
    ):
        """What the connection returns for these arguments."""
        m, k = self.m, len(self.pushed)
        y = add_dropout(y, residual, dropout_p, seed)
        self.pushed.append(self.norm(y, k) if m.norm == "pre" else y)
        if isinstance(m, AttentionResiduals):
            x = attention_row(m, self.pushed, k)
        else:
            w = self.w[k, : k + 1].reshape(k + 1, *(1,) * (y.dim() - 1), -1)
            x = (torch.stack(self.pushed) * w).sum(0)
            x = self.norm(x, k) if m.norm == "post" else x
        if out_norm is None:
            return x
        return x if return_x else None, normalised(x, *out_norm)
