"""The documentation site: `make docs` builds it into build/docs from the pages of this folder."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

from tiledseg.errors import VERSION

sys.path.insert(0, str(Path(__file__).parent))
import generated

project, author, release = "tiledseg", "the authors of tiledseg", VERSION
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build", "jupyter_execute"]
html_theme = "furo"
html_title = f"tiledseg {VERSION}"
html_show_copyright = False
myst_heading_anchors = 3
default_role = "code"  # docstrings write `names` as Markdown does
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 60  # longer ones have a line a parameter
autodoc_member_order = "bysource"
suppress_warnings = ["myst.header"]  # pages begin at any level of heading

# Tutorials are notebooks. The site is built with what their cells print, and not built where a cell fails.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True
# `tests/test_site.py` leaves out some by day. A cell of bash that has not run is read as Python.
nb_execution_excludepatterns = os.environ.get("TILEDSEG_TUTORIALS_LEFT_OUT", "").split()
suppress_warnings += ["misc.highlighting_failure"] if nb_execution_excludepatterns else []
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
PATHS = (Path(__file__).parents[1], Path(__file__).parent / "stand_ins")  # timm imports torchvision, and may find none
os.environ["PYTHONPATH"] = ":".join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
os.environ |= {"OMP_NUM_THREADS": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
if os.getuid() == 0:
    os.environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

_GENERATED = re.compile(r"<!-- generated: (\w+) -->")
_PAGE = re.compile(r"`docs/([\w/-]+\.md)`(?!\])")


def link_pages(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace marks by generated text, and names of pages by links; a page that is not there is a warning: an error."""
    source[0] = _GENERATED.sub(lambda mark: getattr(generated, mark[1])(), source[0])
    up = "../" * name.count("/")
    source[0] = _PAGE.sub(lambda page: f"[]({up}{page[1]})", source[0])  # with the page's title


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_pages)
