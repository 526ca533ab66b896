"""The code in README and docs runs, the Python blocks of a page one after another."""

import re
from pathlib import Path

import pytest
import torch

import deepfast

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
# The widths and the vocabulary of the first pages, and smaller ones.
SMALLER = {"256": "16", "1024": "32", "32000": "100"}


def blocks(path, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.S)


def run(path, smaller):
    for package in ("transformers", "accelerate", "peft"):
        if f"from {package}" in path.read_text():
            pytest.importorskip(package)
    scope: dict = {}
    for block in blocks(path):
        code = re.sub(r"\d+", lambda number: smaller.get(number[0], number[0]), block)
        exec(compile(code, str(path), "exec"), scope)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(path, {})


@pytest.mark.parametrize("path", [README, ROOT / "docs" / "index.md"], ids=lambda p: p.name)
def test_the_first_pages_run_with_smaller_numbers(path):
    run(path, SMALLER)


def test_readme_with_transformers(tmp_path, monkeypatch):
    """The block marked ``py`` needs a checkpoint. A folder has its name."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(intermediate_size=24, vocab_size=200, **sizes)
    plain = transformers.LlamaForCausalLM(config).eval()
    scope = {"deepfast": deepfast}
    for block in blocks(README, "py"):
        plain.save_pretrained(re.search(r'from_pretrained\("([\w./-]+)"', block)[1])
        exec(compile(block, str(README), "exec"), scope)
    tokens = torch.arange(100, 110).view(1, -1)
    assert torch.equal(scope["model"].eval()(tokens).logits, plain(tokens).logits)


def test_links_of_the_readme_lead_somewhere():
    """`mkdocs build --strict` checks those of the other pages."""
    text = README.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    for target in links + re.findall(r' src(?:set)?="([^"]+)"', text):
        assert (ROOT / target).exists(), target
