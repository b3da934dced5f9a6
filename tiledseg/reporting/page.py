"""`report.html`: one file that opens anywhere, with no network: what was run, scores, curves, pictures.

It is made of plain values, so that any command can give what it knows; what is left out is not on the page. Values are
escaped where they stand: names of classes and files may hold anything.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from tiledseg.errors import install
from tiledseg.records import dataclass
from tiledseg.reporting.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Chart
from tiledseg.system.writing import replacing
from tiledseg.version import VERSION

REMEDY = install("report")
_TEMPLATE = Path(__file__).parent / "template"
_MOST_CELLS = 40  # classes a side of the confusion matrix


@dataclass(frozen=True)
class Picture:
    """A PNG or JPEG as a data URL."""

    url: str
    width: int
    height: int


@dataclass(frozen=True)
class Place:
    """A row of the panels. `still`: pictures that stay, by title; `changing`: by title, one for each moment."""

    title: str
    detail: str
    still: Mapping[str, Picture]
    changing: Mapping[str, Sequence[Picture]]


@dataclass(frozen=True)
class Report:
    """What a page shows. `facts`: large figures at the top, (name, value, note); `figures`: of the newest scoring, as
    `validation/step-XXXXXX.json` has them; `moments`: a line for each picture that changes; `about`: tables of (name,
    value) by their titles; `config`: as text."""

    title: str
    subtitle: str
    state: str
    facts: Sequence[tuple[str, str, str]] = ()
    warnings: Sequence[str] = ()
    figures: Mapping[str, Any] | None = None
    charts: Sequence[Chart] = ()
    places: Sequence[Place] = ()
    moments: Sequence[str] = ()
    about: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    config: str = ""


def can_render() -> bool:
    """Whether jinja2 is installed."""
    return importlib.util.find_spec("jinja2") is not None


def render(report: Report) -> str:
    """The page as HTML. Needs jinja2."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: an extra

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "count": count}
    frame = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "top": TOP, "low": HEIGHT - BOTTOM}
    page = environment.get_template("report.html.j2")
    return page.render(
        report=report,
        frame=frame,
        version=VERSION,
        matrix=matrix_of(report.figures),
        diagrams=diagrams_of(report.figures),
    )


def write_page(path: Path, report: Report) -> None:
    """Whole or not at all. Raises WriteError."""
    text = render(report)
    with replacing(path) as part:
        part.write_text(text, "utf-8")


def percent(value: float | None) -> str:
    """A share for people; a dash where there is none."""
    return "-" if value is None else f"{100 * value:.1f} %"


def count(value: int) -> str:
    """A whole number in groups of three digits."""
    return f"{value:,}".replace(",", " ")


@dataclass(frozen=True)
class Matrix:
    """The confusion matrix of the classes with most pixels. `classes`: their names and colours; `rows`: (pixels, share
    of the row's truth) for each; `left_out`: classes that it has no room for."""

    classes: Sequence[Mapping[str, Any]]
    rows: Sequence[Sequence[tuple[int, float]]]
    left_out: int


def matrix_of(figures: Mapping[str, Any] | None) -> Matrix | None:
    """None where nothing was counted."""
    if figures is None:
        return None
    classes, counts = figures["classes"], figures["confusion_matrix"]
    largest = sorted(range(len(classes)), key=lambda k: -classes[k]["pixels"])[:_MOST_CELLS]
    kept = sorted(largest)
    rows = [[(counts[k][j], counts[k][j] / max(1, sum(counts[k]))) for j in kept] for k in kept]
    return Matrix([classes[k] for k in kept], rows, len(classes) - len(kept))


@dataclass(frozen=True)
class Diagram:
    """Reliability of the pixels mapped as one class, or of all. `bins`: (low end, high end, pixels, share right, mean
    confidence), those with pixels; `most`: pixels of the fullest one."""

    name: str
    bins: Sequence[tuple[float, float, int, float, float]]
    pixels: int
    error: float
    most: int


def diagrams_of(figures: Mapping[str, Any] | None) -> list[Diagram]:
    """All classes together, then each class that some pixel is mapped as."""
    reliability = figures.get("reliability") if figures is not None else None
    if figures is None or reliability is None:
        return []
    each = zip(*(reliability[key] for key in ("pixels", "right", "confidence")), strict=True)
    classes = [list(zip(*counts, strict=True)) for counts in each]
    every = [tuple(map(sum, zip(*bins, strict=True))) for bins in zip(*classes, strict=True)]
    names = ["all classes", *(one["name"] for one in figures["classes"])]
    found = [_diagram(name, bins) for name, bins in zip(names, [every, *classes], strict=True)]
    return [diagram for diagram in found if diagram.pixels]


def _diagram(name: str, bins: Sequence[tuple[float, ...]]) -> Diagram:
    size = 1 / len(bins)
    shown = [
        (k * size, (k + 1) * size, int(pixels), right / pixels, confidence / pixels)
        for k, (pixels, right, confidence) in enumerate(bins)
        if pixels
    ]
    pixels = sum(b[2] for b in shown)
    error = sum(abs(b[3] - b[4]) * b[2] for b in shown) / max(1, pixels)
    return Diagram(name, shown, pixels, error, max((b[2] for b in shown), default=0))
