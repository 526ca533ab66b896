"""A hook of mkdocs: the pages outside of docs/, whose links mean the same here and on GitHub."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# README.md is not a page of the site: index.md has its content.
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "bench/results/*.*", "examples/*.ipynb")


def on_files(files, config):
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Pages of docs/ reach those outside without ``../``, which have come to lie beside them."""
    if page.file.generated_by:
        return re.sub(r"\]\((\.\./\.\./)?docs/", r"](\1", markdown)
    outside = r"\]\(\.\./(?=[\w/]*(?:results/|examples/|CHANGELOG|CONTRIBUTING))"
    return re.sub(outside, "](", markdown)
