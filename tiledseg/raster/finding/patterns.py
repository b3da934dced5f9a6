"""Globs, and patterns of labels with the parts of an image's own path.

`{stem}` is the image's file name without its ending, `{parent}` the name of its folder, and `{1}`, `{2}`, ... the text
that the first, second, ... wildcard of the images' glob stands for.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from tiledseg.errors import RasterError
from tiledseg.raster.remote.objects import check_obstore, list_folder, parse_s3

_FIELD = re.compile(r"\{(\w*)\}")
_WILDCARDS = re.compile(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]")
_EXPRESSIONS = {"**/": r"((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}


def is_pattern(path: str) -> bool:
    """Return True if the path has fields to fill in."""
    return _FIELD.search(path) is not None


def labels_for(image: str, wildcards: Sequence[str], pattern: str, key: str) -> str:
    """Return the path that a pattern means for an image. Raises RasterError for a field that the image has not."""
    name = os.path.basename(image)
    fields = {"stem": os.path.splitext(name)[0], "parent": os.path.basename(os.path.dirname(image))}
    fields |= {str(number): value for number, value in enumerate(wildcards, 1)}
    for field in _FIELD.findall(pattern):
        if field not in fields:
            names = ", ".join(f"{{{name}}}" for name in fields)
            raise RasterError(f"{key} is {pattern}, but {image} has no {{{field}}}; give some of {names}")
    return _FIELD.sub(lambda field: fields[field[1]], pattern)


def matched(pattern: str, path: str) -> tuple[str, ...]:
    """Return the text that each wildcard of a glob stands for in a path that it matches; nothing for another path."""
    expression, at = "", 0
    for wildcard in _WILDCARDS.finditer(pattern):
        expression += re.escape(pattern[at : wildcard.start()])
        inner = wildcard[0][1:-1]
        expression += _EXPRESSIONS.get(wildcard[0]) or f"([{'^' + inner[1:] if inner.startswith('!') else inner}])"
        at = wildcard.end()
    match = re.fullmatch(expression + re.escape(pattern[at:]), path)
    return tuple((part or "").rstrip("/") for part in match.groups()) if match else ()


def objects_in(folder: str, key: str, deep: bool = False) -> list[str]:
    """Return the URLs of the objects in a bucket's folder, where `deep` also of those in folders in it. `key` is the
    flag or the key of the configuration that names it, for messages."""
    check_obstore(key, folder)
    name = parse_s3(folder)
    if name is None:
        raise RasterError(f"{key}: the bucket's name has a wildcard or a field; name one bucket")
    return list_folder(name, deep)


def folder_of(url: str) -> str:
    """Return the URL up to its last slash."""
    return url[: url.rindex("/") + 1]


def matching_objects(pattern: str, key: str) -> list[str]:
    """Return the URLs that a glob means, sorted, by the rules of `glob`: `*` stays within a folder, `**/` is any
    folders, and names that begin with a dot are hidden. An object whose own name is the pattern is the only one."""
    folder = folder_of(pattern[: next(at for at in range(len(pattern)) if glob.has_magic(pattern[at]))])
    urls = objects_in(folder, key, deep="/" in pattern[len(folder) :] or "**" in pattern)
    if pattern in urls:
        return [pattern]
    shows_hidden = "/." in pattern
    return sorted(
        url for url in urls if matched(pattern, url) and (shows_hidden or "/." not in f"/{url[len(folder) :]}")
    )
