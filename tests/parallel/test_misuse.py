"""Bad input to `deepfast.parallel` is refused in one sentence."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepfast.nn import DLCL, TransformerDecoder, TransformerEncoder
from deepfast.parallel import edge_payload, shard_tokens, split, sum_connection_gradients
from tests.parallel.encoders import CONNECTIONS, batch, encoder, loss, run

X, TARGET, PADDING = batch()


def backward(stages):
    loss(run(stages, X, PADDING)[0], TARGET).backward()


def call(stage, *payload, **options):
    """A call of one stage of two."""
    return split(encoder(4), 2)[stage](*payload, **options)


def change_sums(change):
    """The last stage of three, where the payload below it is changed."""
    stages = split(encoder(6, **CONNECTIONS["attnres"]), 3)
    stages[-1](*change(*run(stages, X, PADDING)[1][-1]))


def connected(connection):
    return TransformerEncoder(4, 16, 2, 16, connection=connection)


CALLS = [
    (lambda: split(encoder(4), 5), ValueError,
     "split: 4 layers make at most as many stages, got 5"),
    (lambda: split(encoder(4), 0), ValueError, "split: stages must be an integer .* got 0"),
    (lambda: split(encoder(4), 2.0), ValueError, "split: stages must be an integer .* got 2.0"),
    (lambda: split(encoder(4), [1, 2]), ValueError, r"must add up to 4, got \[1, 2\]"),
    (lambda: edge_payload(DLCL(4, 8), [4, 0]), ValueError, "layers of a stage must be .* got 0"),
    *((lambda name=name: split(connected(name), 2), ValueError,
       f"must be one of dlcl, denseformer.* got '{name}'") for name in ("residual", "mudd")),
    (lambda: split(TransformerDecoder(4, 16, 2, 16), 2), TypeError,
     "must be a TransformerEncoder, got TransformerDecoder"),
    (lambda: edge_payload(nn.Linear(2, 2), 2), TypeError,
     "expected a DLCL or AttentionResiduals, got Linear"),
    (lambda: sum_connection_gradients([nn.Linear(2, 2)]), ValueError,
     r"must contain an EncoderStage, got \['Linear'\]"),
    (lambda: sum_connection_gradients(split(encoder(4), 2)[0]), TypeError,
     "stages must be a list of modules, got EncoderStage"),
    (lambda: call(1, X), TypeError, "stage 1 of 2: expected 2 tensors, got 1"),
    (lambda: call(0, X, X), TypeError, "stage 0 of 2: expected 1 tensors, got 2"),
    (lambda: call(0, X[0]), ValueError, r"stage 0 of 2: expected \(B, S, 12\), got \(5, 12\)"),
    (lambda: call(0, X, key_padding_mask=PADDING.float()), ValueError,
     "stage 0 of 2: key_padding_mask must be bool"),
    (lambda: change_sums(lambda y, sums, lse: (y, sums[:1], lse)), ValueError,
     r"tensor 1 must be \((\d), 2, 5, 12\), got \(1, 2, 5, 12"),
    (lambda: change_sums(lambda y, sums, lse: (y, sums, lse[..., :1])), ValueError,
     r"tensor 2 must be \((\d), 2, 5\), got \(\1, 2, 1\)"),
    (lambda: change_sums(lambda y, sums, lse: (y, None, lse)), TypeError,
     "stage 2 of 3: tensor 1 must be a tensor, got NoneType"),
    (lambda: shard_tokens(nn.Linear(2, 2), None), TypeError,
     "expected a DLCL or AttentionResiduals, got Linear"),
    (lambda: shard_tokens(DLCL(2, 4), None), ValueError,
     "mesh must be a DeviceMesh of one dimension, got None"),
    (lambda: torch.compile(split(encoder(4), 2)[0], backend="eager", fullgraph=True)(X), Exception,
     "cannot be compiled as a whole; compile its layers"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), CALLS)
def test_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_gradients_are_summed_once(one_rank):
    stages = split(encoder(4), 2)
    twice = "expected sum_connection_gradients once for each optimizer step"
    for set_to_none in (True, False):
        backward(stages)
        backward(stages)
        sum_connection_gradients(stages)
        with pytest.raises(RuntimeError, match=twice):
            sum_connection_gradients(stages)
        with pytest.raises(RuntimeError, match=twice):
            backward(stages)
        for stage in stages:
            stage.zero_grad(set_to_none)
    sum_connection_gradients(stages)


def test_a_group_is_one_pipeline(one_rank):
    stages = split(encoder(4), 2)
    backward(stages)
    with pytest.raises(ValueError, match="each of the 2 stages once, got stage 0 0 times"):
        sum_connection_gradients(stages[1:])
    with pytest.raises(ValueError, match="each of the 2 stages once, got stage 0 2 times"):
        sum_connection_gradients([*stages, *split(encoder(4), 2)])
    with pytest.raises(ValueError, match="group must contain this rank, got one without it"):
        sum_connection_gradients(stages, dist.GroupMember.NON_GROUP_MEMBER)


def test_copies_that_have_drifted_apart(one_rank):
    """Here a step of the optimizer without their sum."""
    stages = split(encoder(4), 2)
    backward(stages)
    torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1).step()
    with pytest.raises(RuntimeError, match="must be equal on all stages, got 1 that differ"):
        sum_connection_gradients(stages)


@pytest.mark.parametrize("name", ["dlcl", "attnres"])
def test_received_sums_that_change(name):
    first, second = split(encoder(4, **CONNECTIONS[name]), 2)
    payload = tuple(t.detach().requires_grad_() for t in first(X))
    found = loss(second(*payload), TARGET)
    with torch.no_grad():
        payload[1].add_(1)
    with pytest.raises(RuntimeError, match="expected the sums that a stage received as they were"):
        found.backward()


def test_the_encoder_after_its_stages_have_trained():
    whole = encoder(4)
    stages = split(whole, 2)
    whole(X)
    backward(stages)
    torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1).step()
    with pytest.raises(RuntimeError, match="load the state dicts of all stages into it first"):
        whole(X)
    for again in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        again(X)
    whole.load_state_dict({name: p for stage in stages for name, p in stage.state_dict().items()})
    whole(X)
