"""The code in README and docs runs, the Python blocks of a page one after another."""

import re
from pathlib import Path

import pytest
import torch

import deepfast
from tests.attach.models import batch, make

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.S)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_the_code_of_a_page_runs(path, tmp_path, monkeypatch):
    if "from transformers" in path.read_text():
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for block in blocks(path):
        exec(compile(block, str(path), "exec"), scope)


def test_readme_with_transformers(tmp_path, monkeypatch):
    """The block marked ``py`` needs a checkpoint. A folder has its name."""
    monkeypatch.chdir(tmp_path)
    plain = make("LlamaForCausalLM").eval()
    scope = {"deepfast": deepfast}
    for block in blocks(README, "py"):
        plain.save_pretrained(re.search(r'from_pretrained\("([\w./-]+)"', block)[1])
        exec(compile(block, str(README), "exec"), scope)
    tokens = batch()["input_ids"]
    assert torch.equal(scope["model"].eval()(tokens).logits, plain(tokens).logits)


def test_links_of_the_readme_lead_somewhere():
    """`mkdocs build --strict` checks those of the other pages."""
    text = README.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    for target in links + re.findall(r' src(?:set)?="([^"]+)"', text):
        assert (ROOT / target).exists(), target
