"""Names of the rasters of several times: braces around the texts in which paths differ, `s2/north_{0401,0620}.tif`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import takewhile

from tiledseg.raster.array_names import parse_array_name
from tiledseg.raster.composed import BANDS, TIMES, Composed, has_kind, label_of, parse_composed

JOINED = re.compile(r"([^{}]*)\{([^{}]*,[^{}]*)\}([^{}]*)")
_WORDS = re.compile(r"(?:.*[/_.=-])?", re.DOTALL)


def joined_paths(name: str) -> tuple[str, ...]:
    """Return the paths, or patterns, of a joined raster's name; none for any other path."""
    match = None if os.path.exists(name) else JOINED.fullmatch(name)
    return tuple(match[1] + text + match[3] for text in match[2].split(",")) if match else ()


def joined(paths: Sequence[str]) -> str:
    """Return the name of the image that the rasters of several times make."""
    before = _shared(paths)
    after = _shared([path[len(before) :][::-1] for path in paths])[::-1]
    texts = [path[len(before) : len(path) - len(after)] for path in paths]
    return str(Composed.of(f"{before}{{{','.join(texts)}}}{after}", TIMES, paths))


def _shared(texts: Sequence[str]) -> str:
    """Return the whole words with which all texts begin."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    match = _WORDS.match("".join(letters[0] for letters in alike))
    return match[0] if match else ""


def file_name(path: str) -> str:
    """Return the last part of a path; of several times' name that without its braces, or of its first path."""
    path = label_of(path)
    name = os.path.basename(re.sub(r"[_.=-]?\{.*\}", "", path) if "{" in path else path)
    several = joined_paths(path)
    return os.path.basename(several[0]) if several and (not name or name.startswith(".")) else name


def stem_of(path: str) -> str:
    """Return the name of files that go with an image: its own without ending, the item's, the first part's."""
    composed, array = parse_composed(path), parse_array_name(path)
    if array is not None:
        return array.stem
    if composed is None or (composed.kind == TIMES and not has_kind(path, BANDS)):
        return os.path.splitext(file_name(path))[0]
    of_items = composed.kind in (BANDS, TIMES)
    return composed.label.rpartition("#")[2] if of_items else stem_of(str(composed.parts[0]))
