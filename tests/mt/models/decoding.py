"""Decoding position by position against the whole forward pass, for every kind of model."""

import torch

SOURCE = torch.tensor([[5, 6, 7, 9, 3], [8, 4, 3, 0, 0], [7, 3, 0, 0, 0]])
TARGET = torch.tensor([[2, 9, 5, 6], [2, 4, 0, 0], [2, 8, 7, 0]])
NEAR = {"rtol": 1e-4, "atol": 1e-4}


def assert_close(a, b):
    torch.testing.assert_close(a, b, **NEAR)


@torch.no_grad()
def assert_steps_equal_forward(model, source=SOURCE, target=TARGET, **tolerance):
    """At every real position; padding is 0."""
    rows = model(source, target)
    logits = rows.new_zeros(*target.shape, rows.shape[-1])
    logits[target != 0] = rows
    state = model.start(source)
    for position in range(target.shape[1]):
        step, real = model.step(target[:, position], state), target[:, position] != 0
        torch.testing.assert_close(step[real], logits[real, position], **tolerance)


@torch.no_grad()
def assert_hypotheses_reorder(model, **tolerance):
    """Hypotheses may be repeated, dropped and exchanged."""
    state = model.start(SOURCE)
    model.step(torch.tensor([2, 2, 2]), state)
    # Sentence 1 twice, sentence 0 once, sentence 2 gone.
    state.reorder(torch.tensor([1, 1, 0]))
    model.step(torch.tensor([5, 6, 7]), state)
    state.reorder(torch.tensor([1, 0, 2]), encoded=False)
    state.reorder(torch.tensor([2, 0]))
    got = model.step(torch.tensor([9, 4]), state)
    expected = model(SOURCE[[0, 1]], torch.tensor([[2, 7, 9], [2, 6, 4]]))
    torch.testing.assert_close(got, expected.view(2, 3, -1)[:, -1], **tolerance)
