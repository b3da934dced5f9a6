"""`report.html`: one file that opens anywhere, with no network, by jinja2 (an extra).

Values are escaped where they stand: names of classes and files may hold anything.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiledseg.errors import install
from tiledseg.reporting.curves import can_plot
from tiledseg.version import VERSION

REMEDY = install("report")
_TEMPLATE = Path(__file__).parent / "template"
_MOST_CELLS = 40  # classes a side of the confusion matrix


def can_render() -> bool:
    """Return True if jinja2 and matplotlib are installed."""
    return importlib.util.find_spec("jinja2") is not None and can_plot()


def render(page: Mapping[str, Any]) -> str:
    """Return the page as HTML; `page` holds the values that the template names."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: an extra

    loader = FileSystemLoader(_TEMPLATE)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": percent, "count": count}
    matrix = matrix_of(page["figures"]) if page["figures"] else None
    return environment.get_template("report.html.j2").render(page, version=VERSION, matrix=matrix)


def png_url(data: bytes) -> str:
    """Return a PNG as a data URL. Raises ValueError for other data."""
    if not data.startswith(b"\x89PNG"):
        raise ValueError("a picture is no PNG")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def percent(value: float | None) -> str:
    """Return a share for people; a dash for None."""
    return "-" if value is None else f"{100 * value:.1f} %"


def count(value: int) -> str:
    """Return a whole number in groups of three digits."""
    return f"{value:,}".replace(",", " ")


def matrix_of(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the confusion matrix of the classes with most pixels: rows of (pixels, share of the row's truth)."""
    classes, counts = figures["classes"], figures["confusion_matrix"]
    kept = sorted(sorted(range(len(classes)), key=lambda k: -classes[k]["pixels"])[:_MOST_CELLS])
    rows = [[(counts[k][j], counts[k][j] / max(1, sum(counts[k]))) for j in kept] for k in kept]
    return {"classes": [classes[k] for k in kept], "rows": rows, "left_out": len(classes) - len(kept)}
