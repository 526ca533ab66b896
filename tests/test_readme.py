"""The code in README and docs runs, at small sizes and as printed; links and commands exist."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import deepfast

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.S)


# The widths and the vocabulary of the first pages, and smaller ones.
SMALLER = {"256": "16", "1024": "32", "32000": "100"}


@pytest.mark.parametrize("printed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_examples_run(path, printed):
    code = "".join(blocks(path))
    smaller = {} if printed or path.name not in ("README.md", "index.md") else SMALLER
    if "from transformers" in code:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    if "from peft" in code:
        pytest.importorskip("peft")
    scope: dict = {}
    for block in blocks(path):
        code = re.sub(r"\d+", lambda number: smaller.get(number[0], number[0]), block)
        exec(compile(code, str(path), "exec"), scope)
    if path == README:
        assert scope["x"].shape == (8, 32, 256 if printed else 16)
        assert scope["connection"].weight.grad is not None


def test_readme_with_transformers(tmp_path, monkeypatch):
    """The block marked ``py`` needs transformers. A folder has the name of the checkpoint."""
    transformers = pytest.importorskip("transformers")
    (block,) = re.findall(r"```py\n(.*?)```", README.read_text(), flags=re.S)
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(intermediate_size=24, vocab_size=200, **sizes)
    plain = transformers.LlamaForCausalLM(config).eval()
    plain.save_pretrained("HuggingFaceTB/SmolLM2-135M")
    scope = {"deepfast": deepfast}
    exec(compile(block, str(README), "exec"), scope)
    model, tokens = scope["model"].eval(), torch.arange(100, 110).view(1, -1)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    model(tokens, labels=tokens).loss.backward()
    assert model.model.depth_connection.weight.grad.abs().sum() > 0


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 110


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    text = path.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    for target in links + re.findall(r' src(?:set)?="([^"]+)"', text):
        assert (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.fixture
def loop():
    """The names of the training loop in docs/training.md, after its code ran."""
    block, *_ = blocks(ROOT / "docs" / "training.md")
    scope = {"torch": torch, "deepfast": deepfast}
    exec(compile(block, "training.md", "exec"), scope)
    assert scope["x"].shape == (24, 64)
    assert scope["losses"][-1] < scope["losses"][0]
    assert all(p.grad is not None for p in scope["parameters"])
    return scope


def test_what_is_said_of_the_training_loop(loop):
    """Its layer compiles without a break, and checkpoints together with its push."""
    stack, connect, lengths = loop["stack"], loop["connect"], loop["cu_seqlens"]

    def run(layers, checkpointed=False, numbered=True):
        torch.manual_seed(1)
        history = deepfast.nn.DepthHistory()
        x = connect(loop["tokens"], history)
        for k, layer in enumerate(layers, 1):

            def push(x, k=k if numbered else None, layer=layer):
                return connect(layer(x, lengths, 12), history, index=k)

            x = checkpoint(push, x, use_reentrant=False) if checkpointed else push(x)
        return torch.autograd.grad(x.square().sum(), loop["parameters"][:-2])

    plain = run(stack)
    for numbered in (True, False):
        for a, b in zip(run(stack, checkpointed=True, numbered=numbered), plain, strict=True):
            assert torch.equal(a, b)
    with set_checkpoint_early_stop(False), pytest.raises(RuntimeError, match="pass index="):
        run(stack, checkpointed=True, numbered=False)
    for layer in stack:
        layer.eval().compile(fullgraph=True, backend="aot_eager")
    compiled = run(stack)
    for layer in stack:
        layer._compiled_call_impl = None
    for a, b in zip(compiled, run(stack), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_layer_takes_a_batch_of_nothing(loop):
    x = torch.randn(0, 64, requires_grad=True)
    for lengths in ([0], [0, 0]):
        y = loop["stack"][0](x, torch.tensor(lengths, dtype=torch.int32), 0)
        y.sum().backward()
        assert y.shape == x.grad.shape == (0, 64)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_exist(path):
    from deepfast.cli import COMMANDS

    text = path.read_text()
    lines = re.findall(r"```sh\n(.*?)```", text, re.S) + re.findall(r"^ {4}(.*\n)", text, re.M)
    for command in re.findall(r"^deepfast ((?:mt )?[\w-]+)", "".join(lines), re.M):
        assert command in COMMANDS


def test_modules_of_commands_exist():
    for path in PAGES:
        for module in re.findall(r"python -m ([\w.]+)", path.read_text()):
            if module.split(".")[0] in ("bench", "deepfast"):
                assert importlib.util.find_spec(module) is not None, f"{path.name}: {module}"
