"""What an s3:// URL stands for, as `sources` has it for paths: a folder, or a glob. By one rank, before a run."""

from __future__ import annotations

import glob

from tiledseg.errors import RasterError
from tiledseg.raster.finding.pairing import matched
from tiledseg.raster.remote.s3_store import S3Name, check_obstore, list_folder, parse_s3


def is_bucket_folder(path: str) -> bool:
    """Return True if the path is s3://bucket, or s3://bucket/folder/ with the slash."""
    name = parse_s3(path)
    return name is not None and (name.key.endswith("/") or not name.key)


def in_bucket_folder(folder: str, key: str) -> list[str]:
    """Return the URLs of the objects in a folder, not of those in folders in it. `key` is what wants them, for
    messages."""
    return _list(folder, key, deep=False)


def objects_below(start: str, key: str) -> frozenset[str]:
    """Return the URLs of all objects in the folder in which URLs that begin with `start` lie, and below."""
    return frozenset(_list(_folder_of(start), key, deep=True))


def matching_objects(pattern: str, key: str) -> list[str]:
    """Return the URLs that a glob means, sorted: as `glob` takes it, `*` stays within a folder, `**/` is any folders,
    and what begins with a dot is hidden. An object whose own name is the pattern is meant by it."""
    folder = _folder_of(pattern[: _first_wildcard(pattern)])
    found = _list(folder, key, deep="/" in pattern[len(folder) :] or "**" in pattern)
    if pattern in found:
        return [pattern]
    return sorted(url for url in found if matched(pattern, url) and _is_shown(url[len(folder) :], pattern))


def _list(folder: str, key: str, deep: bool) -> list[str]:
    check_obstore(key, folder)
    name = parse_s3(folder)
    if name is None:
        raise RasterError(f"{key}: the bucket's name has a wildcard or a field; name one bucket")
    return [S3Name(name.bucket, found).url for found in list_folder(name.bucket, name.key, deep)]


def _folder_of(url: str) -> str:
    return url[: url.rindex("/") + 1]


def _first_wildcard(pattern: str) -> int:
    return next(at for at in range(len(pattern)) if glob.has_magic(pattern[at]))


def _is_shown(below: str, pattern: str) -> bool:
    return "/." in pattern or not any(part.startswith(".") for part in below.split("/"))
