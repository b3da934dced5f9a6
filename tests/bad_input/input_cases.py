"""Inputs that are no rasters of the kind that is read: other files' pixels, servers' answers, pipes and devices."""

from __future__ import annotations

from tests.bad_input.case import Case, predict, train

_REFUSED = ("cannot open", "data.references", "--references")
_SCORE = "--prediction ROOT/second-labels.tif --labels ROOT/labels.tif"
_TILE = "--images ROOT/image.tif --labels ROOT/labels.tif --grid 2 --levels 2 --output ROOT/new.h5"


def _tile(name: str, typed: str, *words: str) -> Case:
    return Case(name, "tile", f"{_TILE} {typed}", words)


def _evaluate(name: str, typed: str, *words: str) -> Case:
    return Case(name, "evaluate", f"{_SCORE} {typed}", words)


_FORMATS = (
    train("vrt-for-an-image", "--data.images ROOT/vrt.tif", "vrt.tif", *_REFUSED),
    train("vrt-for-a-mask", "--data.images ROOT/masked.tif", "masked.tif.msk", "masked.tif", "no TIFF", "references"),
    predict("vrt", "--image ROOT/vrt.tif", "vrt.tif", *_REFUSED),
    _tile("raw-vrt", "--images ROOT/raw-vrt.tif", "raw-vrt.tif", *_REFUSED),
    _evaluate("vrt", "--prediction ROOT/vrt.tif", "vrt.tif", *_REFUSED),
)

_KINDS = (
    train("fifo-for-an-image", "--data.images ROOT/fifo", "data.images", "fifo", "is a FIFO", "regular file"),
    train("fifo-for-labels", "--data.labels ROOT/fifo", "data.labels", "fifo", "is a FIFO", "regular file"),
    train("device-for-an-image", "--data.images /dev/zero", "/dev/zero", "is a character device", "regular file"),
    train("link-to-a-fifo", "--data.images ROOT/link-to-fifo.tif", "link-to-fifo.tif", "is a FIFO", "regular file"),
    train("fifo-in-a-store-s-name", "--data.images 'ROOT/fifo#0' --data.labels []", "fifo#0", "does not exist"),
    train("fifo-beside-an-image", "--data.images ROOT/piped.tif", "piped.tif.aux.xml", "is a FIFO", "regular file"),
    predict("fifo-for-an-image", "--image ROOT/fifo", "fifo", "is a FIFO", "regular file"),
    _tile("fifo-for-labels", "--labels ROOT/fifo", "--labels", "fifo", "is a FIFO", "regular file"),
    _evaluate("device-to-show", "--image /dev/zero --plot ROOT/plot.png", "/dev/zero", "is a character device"),
)

_PLACES = (
    train("transform-of-nan", "--data.images ROOT/nowhere-on-earth.tif", "nowhere-on-earth.tif", "transform", "nan"),
    predict("transform-of-nan", "--image ROOT/nowhere-on-earth.tif", "nowhere-on-earth.tif", "transform", "nan"),
)

_STORE = "--data.labels [] --data.images"

_STORES = (
    train("store-with-a-flipped-pixel", f"{_STORE} ROOT/flipped.h5", "flipped.h5#0", "filter", "copy it again"),
    train("store-with-flipped-labels", f"{_STORE} ROOT/flipped-labels.h5", "flipped-labels.h5#0:labels", "filter"),
    train("store-of-a-changed-grid", f"{_STORE} ROOT/regridded.h5", "regridded.h5", "tiles of (4, ", "cut it again"),
    train("store-linked-to-another", f"{_STORE} ROOT/linked.h5", "linked.h5", "links", "cut it again"),
    train("store-of-an-older-version", f"{_STORE} ROOT/old.h5", "old.h5", "version 2", "remove it and cut it again"),
    predict("store-of-a-changed-grid", "--image ROOT/regridded.h5", "regridded.h5", "tiles of (4, ", "cut it again"),
    _tile("output-is-an-edited-store", "--output ROOT/regridded.h5", "regridded.h5", "its grid was [2, 3]"),
    _evaluate("store-of-an-older-version", "--labels ROOT/old.h5", "old.h5", "version 2", "cut it again"),
)

INPUTS = (*_FORMATS, *_KINDS, *_PLACES, *_STORES)
