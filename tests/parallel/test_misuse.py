"""Bad input to `deepfast.parallel` is refused in one sentence."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepfast.nn import DLCL, TransformerDecoder, TransformerEncoder
from deepfast.parallel import edge_payload, split, sum_connection_gradients
from tests.parallel.encoders import CONNECTIONS, batch, encoder, loss, run


def backward(stages):
    x, target, padding = batch()
    loss(run(stages, x, padding)[0], target).backward()


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (5, "split: 4 layers make at most as many stages, got 5"),
        (0, "split: stages must be a whole number of at least 1, got 0"),
        (2.0, "split: stages must be a whole number of at least 1, got 2.0"),
        ([1, 2], r"must add up to 4, got \[1, 2\]"),
        ([4, 0], "layers of a stage must be a whole number of at least 1, got 0"),
    ],
)
def test_stages(stages, message):
    with pytest.raises(ValueError, match=message):
        split(encoder(4), stages)
    with pytest.raises(ValueError, match=message):
        edge_payload(DLCL(4, 8), stages)


@pytest.mark.parametrize("connection", ["residual", "latent", "mudd"])
def test_connections(connection):
    with pytest.raises(ValueError, match=f"must be one of dlcl, denseformer.* got '{connection}'"):
        split(TransformerEncoder(4, 16, 2, 16, connection=connection), 2)


def test_other_modules():
    with pytest.raises(TypeError, match="must be a TransformerEncoder, got TransformerDecoder"):
        split(TransformerDecoder(4, 16, 2, 16), 2)
    with pytest.raises(TypeError, match="expected a DLCL or AttentionResiduals, got Linear"):
        edge_payload(nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match=r"must contain an EncoderStage, got \['Linear'\]"):
        sum_connection_gradients([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="stages must be a list of modules, got EncoderStage"):
        sum_connection_gradients(split(encoder(4), 2)[0])


def test_operands():
    first, second = split(encoder(4), 2)
    x, _, padding = batch()
    with pytest.raises(TypeError, match="stage 1 of 2: expected 2 tensors, got 1"):
        second(x)
    with pytest.raises(TypeError, match="stage 0 of 2: expected 1 tensors, got 2"):
        first(x, x)
    with pytest.raises(ValueError, match=r"stage 0 of 2: expected \(B, S, 12\), got \(5, 12\)"):
        first(x[0])
    with pytest.raises(ValueError, match="stage 0 of 2: key_padding_mask must be bool"):
        first(x, key_padding_mask=padding.float())


def test_malformed_sums():
    stages = split(encoder(6, **CONNECTIONS["attnres"]), 3)
    x, _, padding = batch()
    _, crossed = run(stages, x, padding)
    y, sums, lse = crossed[-1]
    last = stages[-1]
    rows = len(last.below.carried)
    with pytest.raises(
        ValueError, match=rf"tensor 1 must be \({rows}, 2, 5, 12\), got \(1, 2, 5, 12"
    ):
        last(y, sums[:1], lse)
    with pytest.raises(
        ValueError, match=rf"tensor 2 must be \({rows}, 2, 5\), got \({rows}, 2, 1\)"
    ):
        last(y, sums, lse[..., :1])
    with pytest.raises(TypeError, match="stage 2 of 3: tensor 1 must be a tensor, got NoneType"):
        last(y, None, lse)


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
    with pytest.raises(RuntimeError, match="must be equal on all stages, got 1 others"):
        sum_connection_gradients(stages)


@pytest.mark.parametrize("name", ["dlcl", "attnres"])
def test_received_sums_that_change(name):
    first, second = split(encoder(4, **CONNECTIONS[name]), 2)
    x, target, _ = batch()
    payload = tuple(t.detach().requires_grad_() for t in first(x))
    found = loss(second(*payload), target)
    with torch.no_grad():
        payload[1].add_(1)
    with pytest.raises(RuntimeError, match="expected the sums that a stage received as they were"):
        found.backward()


def test_the_encoder_after_its_stages_have_trained():
    whole = encoder(4)
    stages = split(whole, 2)
    x, _, _ = batch()
    whole(x)
    backward(stages)
    torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=0.1).step()
    with pytest.raises(RuntimeError, match="load the state dicts of all stages into it first"):
        whole(x)
    for again in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        again(x)
    whole.load_state_dict({name: p for stage in stages for name, p in stage.state_dict().items()})
    whole(x)


def test_compiled_as_a_whole():
    first, _ = split(encoder(4), 2)
    with pytest.raises(Exception, match="cannot be compiled as a whole; compile its layers"):
        torch.compile(first, backend="eager", fullgraph=True)(batch()[0])
