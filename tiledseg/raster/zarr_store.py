"""The safe reading of untrusted Zarr stores: keys must lie in the store, codecs must only decode bytes, and a missing
chunk is an error unless the store declares such pixels as nodata. Recent chunks are cached, so neighbouring tiles with
overlapping contexts read each chunk once."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Self

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import LocalStore, ObjectStore, WrapperStore

from tiledseg.errors import RasterError, require
from tiledseg.raster.gdal_open import CACHE_BYTES
from tiledseg.raster.remote import advice, is_remote, object_store, said
from tiledseg.system.files import STORE_FILES, irregular_kind

CODECS = """bytes transpose sharding_indexed crc32c crc32 adler32 fletcher32 vlen-utf8 zstd blosc gzip zlib lz4 lzma bz2
shuffle delta fixedscaleoffset quantize bitround astype"""
"""Allowed codecs, which only decode bytes. Not pickle, which runs code, nor codecs registered by other packages."""

# Warnings on consolidated metadata. A process-wide filter, because `catch_warnings` is not safe with threads.
warnings.filterwarnings("ignore", message="Failed to open Zarr store with consolidated|Consolidated metadata is")

_DAMAGED = "the store may be truncated or damaged: copy it again"


class _Kept:
    """A cache of the bytes read last from all stores, up to `most`. Only zarr's asyncio thread changes it."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._values: OrderedDict[object, Buffer | None] = OrderedDict()
        self._running: dict[object, asyncio.Task[Buffer | None]] = {}

    async def take(self, wanted: object, read: Callable[[], Awaitable[Buffer | None]]) -> Buffer | None:
        """Return the cached value, or that of `read()`, which runs once for concurrent requests."""
        if wanted in self._values:
            self._values.move_to_end(wanted)
            return self._values[wanted]
        if wanted not in self._running:
            self._running[wanted] = asyncio.create_task(self._read(wanted, read))
        return await asyncio.shield(self._running[wanted])

    async def _read(self, wanted: object, read: Callable[[], Awaitable[Buffer | None]]) -> Buffer | None:
        try:
            value = await read()
        finally:
            del self._running[wanted]
        self._values[wanted] = value
        self._bytes += len(value or b"")
        while self._bytes > self._most:
            self._bytes -= len(self._values.popitem(last=False)[1] or b"")
        return value


_kept = _Kept(CACHE_BYTES)


class GuardedStore(WrapperStore[Any]):
    """A read-only store with checks. `lacks`: chunks may be missing and mean pixels without data."""

    def __init__(self, store: Any, place: str = "") -> None:
        super().__init__(store)
        self._place, self.lacks = place, False
        self._root = os.path.join(os.path.realpath(place), "")
        self.forget()

    def _with_store(self, store: Any) -> Self:
        return type(self)(store, self._place)

    def forget(self) -> None:
        """Ignore cached values from now on."""
        self._mark = object()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of a key; None for missing metadata, and for a missing chunk without data."""
        return await _kept.take((self._mark, key, byte_range), lambda: self._read(key, prototype, byte_range))

    async def _read(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
        remote = is_remote(self._place)
        if not remote:  # a link may lead out of it
            file = os.path.join(self._place, key)
            if (kind := irregular_kind(file)) is not None:
                raise RasterError(f"{file} is {kind}, not a chunk in a regular file; {_DAMAGED}")
            if not (there := os.path.realpath(file)).startswith(self._root):
                raise RasterError(f"{file} leads out of its store, to {there}; copy the store with its files")
        try:
            value: Buffer | None = await super().get(key, prototype, byte_range)
        except Exception as error:
            words = said(error)
            remedy = advice(os.environ, self._place, words) if remote else _DAMAGED
            raise RasterError(f"cannot read {key} of {self._place}: {words}; {remedy}") from error
        name = key.rpartition("/")[2]
        if name in (*STORE_FILES, ".zattrs"):
            if value is not None and name != ".zattrs":
                _check_codecs(self._place, key, value.to_bytes())
        elif value is None and not self.lacks:
            raise RasterError(
                f"{self._place} has no chunk {key}, whose pixels would be its fill value; copy the store again, write "
                "empty chunks too (zarr: write_empty_chunks), or name this value as _FillValue"
            )
        return value


def open_store(place: str) -> GuardedStore:
    """Return the store at a folder or a URL."""
    if is_remote(place):
        require(f"the store {place}", "s3", "obstore")
        return GuardedStore(ObjectStore(object_store(place), read_only=True), place)
    return GuardedStore(LocalStore(place, read_only=True), place)


def _check_codecs(place: str, key: str, text: bytes) -> None:
    """Raise RasterError for a codec outside `CODECS` in the metadata of arrays."""
    waiting: list[Any] = [json.loads(text)]
    codecs: list[Any] = []
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            for name in ("compressor", "filters", "codecs", "index_codecs"):
                each = node.get(name) or []
                codecs += [each] if isinstance(each, dict | str) else each
            waiting += [value for name, value in node.items() if not name.endswith(("attributes", ".zattrs"))]
    for codec in codecs:
        words = codec if isinstance(codec, dict) else {"id": codec}
        name = str(words.get("id", words.get("name"))).removeprefix("numcodecs.")
        if name not in CODECS.split():
            raise RasterError(f"{key} of {place} has the codec {name[:40]!r}; rewrite it with zstd, blosc or gzip")
