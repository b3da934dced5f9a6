"""The documentation site: `make docs` builds it into build/docs from the pages of this folder."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

from tiledseg.version import VERSION

sys.path.insert(0, str(Path(__file__).parent))
import generated

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

_GENERATED = re.compile(r"<!-- generated: (\w+) -->")
_PAGE = re.compile(r"`docs/([\w/-]+\.md)`(?!\])")


def link_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace marks by generated text, and names of pages by links; a page that is not there is a warning: an error."""
    source[0] = _GENERATED.sub(lambda mark: getattr(generated, mark[1])(), source[0])
    up = "../" * name.count("/")
    source[0] = _PAGE.sub(lambda page: f"[`docs/{page[1]}`]({up}{page[1]})", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_pages)
