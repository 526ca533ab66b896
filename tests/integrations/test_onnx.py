"""Models exported to ONNX: onnxruntime computes the same, for any batch and length."""

import io

import pytest
import torch
from torch.export import Dim

import deepfast
from deepfast import nn
from tests.attach.models import CASES, VOCAB, D, perturbed

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = [
    # An export takes half a minute.
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

ANY = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def assert_same_in_onnxruntime(model, batch):
    """batch: (sentences, tokens) -> the model's operands, last of them the mask of padding."""
    example = batch(2, 5)
    shapes = (ANY,) * len(example)
    program = torch.onnx.export(model, example, dynamic_shapes=shapes, dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    for size in ((2, 5), (3, 9)):
        operands = batch(*size)
        (got,) = session.run(None, dict(zip(names, (x.numpy() for x in operands), strict=True)))
        with torch.no_grad():
            wanted = model(*operands)
        wanted = wanted if isinstance(wanted, torch.Tensor) else wanted[0]
        torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=0, atol=1e-5)


def test_an_encoder():
    model = perturbed(nn.TransformerEncoder(2, D, 2, 24, connection="attnres")).eval()

    def batch(sentences, tokens):
        padding = torch.zeros(sentences, tokens, dtype=torch.bool)
        padding[1, tokens // 2 :] = True
        return torch.randn(sentences, tokens, D), padding

    assert_same_in_onnxruntime(model, batch)


def test_a_connected_and_patched_model_of_transformers():
    model = CASES["bert"].connected()
    deepfast.patch(model)

    def batch(sentences, tokens):
        mask = torch.ones(sentences, tokens, dtype=torch.long)
        mask[1, tokens - 2 :] = 0
        return torch.randint(3, VOCAB, (sentences, tokens)), mask

    assert_same_in_onnxruntime(model.eval(), batch)
