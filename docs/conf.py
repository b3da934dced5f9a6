"""The documentation site: `make docs` builds it into build/docs from the pages of this folder."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from tiledseg.version import VERSION

project, author, release = "tiledseg", "the authors of tiledseg", VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = f"tiledseg {VERSION}"
html_show_copyright = False
myst_heading_anchors = 3
default_role = "code"  # docstrings write `names` as Markdown does
autodoc_typehints = "description"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]  # pages begin at any level of heading

_PAGE = re.compile(r"`docs/([\w/-]+\.md)`(?!\])")


def link_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """A page that another one names is a link to it. One that is not there is then a warning, which is an error."""
    up = "../" * name.count("/")
    source[0] = _PAGE.sub(lambda page: f"[`docs/{page[1]}`]({up}{page[1]})", source[0])


def list_others(app: Sphinx, name: str, source: list[str]) -> None:
    """A page that the index does not name is under "More": none can be forgotten."""
    if name == "index":
        named = set(re.findall(r"^[\w-]+$", source[0], re.MULTILINE))
        others = sorted({page.stem for page in Path(app.srcdir).glob("*.md")} - named - {"index"})
        if others:
            lines = "\n".join(others)
            source[0] += f"\n```{{toctree}}\n:caption: More\n:maxdepth: 1\n\n{lines}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_pages)
    app.connect("source-read", list_others)
