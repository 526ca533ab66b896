"""A hook of mkdocs: the pages outside of docs/, whose links mean the same here and on GitHub."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# README.md is not a page of the site: index.md has its content.
OUTSIDE = (
    "CHANGELOG.md", "CONTRIBUTING.md", "bench/results/*.*", "examples/*.ipynb",
)  # fmt: skip


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


def on_page_content(html, **_):
    """In tables names break after these signs only, and dates nowhere: so they fit a phone."""

    def name(found):
        return (
            re.sub(r"([_.(=/,])(?=[^<])", r"\1<wbr>", found[0].removesuffix("</code>")) + "</code>"
        )

    def cell(found):
        text = re.sub(r"<code>[^<]*</code>", name, found[0])
        return re.sub(r"\d{4}-\d\d-\d\d", r'<span class="date">\g<0></span>', text)

    return re.sub(r"<td.*?</td>", cell, html, flags=re.DOTALL)
