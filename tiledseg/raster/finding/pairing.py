"""Which labels go with an image: by a pattern with the parts of the image's own path.

`{stem}` is the image's file name without its ending, `{parent}` the name of its folder, and `{1}`, `{2}`, ... what the
first, second, ... wildcard of the images' glob stands for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from tiledseg.errors import RasterError

_FIELD = re.compile(r"\{(\w*)\}")
_WILDCARDS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]")


def is_pattern(path: str) -> bool:
    """Return True if the path has fields to fill in."""
    return _FIELD.search(path) is not None


def matched(glob: str, path: str) -> tuple[str, ...]:
    """Return the text that each wildcard of a glob stands for in a path that it matches."""
    expression, at = "", 0
    for found in _WILDCARDS.finditer(glob):
        expression += re.escape(glob[at : found.start()]) + _expression(found[0])
        at = found.end()
    match = re.fullmatch(expression + re.escape(glob[at:]), path)
    return tuple((part or "").rstrip("/") for part in match.groups()) if match else ()


def _expression(wildcard: str) -> str:
    if wildcard == "**/":
        return r"((?:.*/)?)"
    if wildcard.startswith("["):
        inner = wildcard[1:-1]
        return f"([{'^' + inner[1:] if inner.startswith('!') else inner}])"
    return {"**": "(.*)", "*": "([^/]*)", "?": "([^/])"}[wildcard]


def labels_for(image: str, wildcards: Sequence[str], pattern: str, key: str) -> str:
    """Return the path that a pattern means for an image. Raises RasterError for a field that the image has not."""
    name = os.path.basename(image)
    fields = {"stem": os.path.splitext(name)[0], "parent": os.path.basename(os.path.dirname(image))}
    fields |= {str(number): value for number, value in enumerate(wildcards, 1)}

    def value(field: re.Match[str]) -> str:
        if field[1] not in fields:
            known = ", ".join(f"{{{name}}}" for name in fields)
            raise RasterError(f"{key} is {pattern}, but {image} has no {{{field[1]}}}; give some of {known}")
        return fields[field[1]]

    return _FIELD.sub(value, pattern)
