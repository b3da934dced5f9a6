"""The runs that are predicted and measured: none of their networks is one that a calibration measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_SMALL = {"model.levels": "3", "model.base_channels": "16"}
_DEEP = {"model.levels": "4", "model.base_channels": "8"}
_WIDE = {"model.levels": "3", "model.base_channels": "32"}
_MIDDLE = {"model.levels": "4", "model.base_channels": "16"}


class Case(NamedTuple):
    """A training run: ranks, the side of its image in pixels, and its keys. Those of one `group` do the same by other
    ways: the quickest of them is what a search should choose."""

    group: str
    way: str
    ranks: int
    side: int
    keys: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.group}, {self.way}"


def cases() -> list[Case]:
    return [*_alone(), *_shared(2), *_shared(4)]


def _alone() -> Iterator[Case]:
    """One rank, over grids."""
    for group, side, keys, grids in (
        ("L3 c16, 768 px", 768, _SMALL, (1, 2, 3, 4, 6)),
        ("L4 c8, 768 px", 768, _DEEP, (1, 2, 4)),
        ("L3 c32, 384 px", 384, _WIDE, (1, 2, 3)),
        ("L4 c16, 512 px", 512, _MIDDLE, (1, 2)),
        ("L5 c8, 768 px", 768, {"model.levels": "5", "model.base_channels": "8"}, (1, 2)),
        ("L3 c24, 512 px", 512, _SMALL | {"model.base_channels": "24"}, (1, 2)),
        ("L3 c12, 640 px", 640, _SMALL | {"model.base_channels": "12"}, (1, 3)),
        ("L3 c16 pixel norm, 512 px", 512, _SMALL | {"model.norm": "pixel"}, (1, 2)),
        ("L3 c16 instance norm, 512 px", 512, _SMALL | {"model.norm": "instance"}, (1,)),
        ("L4 c8 instance norm, 768 px", 768, _DEEP | {"model.norm": "instance"}, (1,)),
        ("L3 c16 nearest, 512 px", 512, _SMALL | {"model.upsampling": "nearest"}, (1, 2)),
        ("L3 c16 bilinear, 512 px", 512, _SMALL | {"model.upsampling": "bilinear"}, (1,)),
        ("L3 c16 unpadded, 512 px", 512, _SMALL | {"model.padding": "valid"}, (2,)),
        ("L3 c8 kernel 5, 512 px", 512, _SMALL | {"model.base_channels": "8", "model.kernel": "5"}, (1, 2)),
        ("L3 c16 bf16, 512 px", 512, _SMALL | {"train.precision": "bf16"}, (1, 2)),
        ("L3 c8 fp64, 384 px", 384, _SMALL | {"model.base_channels": "8", "train.precision": "fp64"}, (1, 2)),
        ("segnet L3 c16, 512 px", 512, _SMALL | {"model.name": "segnet"}, (1,)),
    ):
        for grid in grids:
            yield Case(group, f"grid {grid}", 1, side, keys | {"tiling.grid": str(grid)})


def _shared(ranks: int) -> Iterator[Case]:
    """Two or four ranks, over modes, meshes and stages."""
    mesh = {2: "[2,1]", 4: "[2,2]"}[ranks]
    for group, side, keys in (("L3 c16, 768 px", 768, _SMALL), ("L4 c16, 512 px", 512, _MIDDLE)):
        grid2, grid4 = (keys | {"tiling.grid": grid} for grid in ("2", "4"))
        place = f"{group}, {ranks} ranks"
        yield Case(place, "read, grid 2", ranks, side, grid2)
        yield Case(place, "read, grid 4", ranks, side, grid4)
        yield Case(place, "exchange, grid 2", ranks, side, grid2 | {"parallel.halo": "exchange", "parallel.mesh": mesh})
        yield Case(place, "layer", ranks, side, grid2 | {"parallel.halo": "layer", "parallel.mesh": mesh})
        yield Case(
            place,
            "layer, fusion 3",
            ranks,
            side,
            grid2 | {"parallel.halo": "layer", "parallel.mesh": mesh, "parallel.fusion": "3"},
        )
        yield Case(place, "2 stages, grid 4", ranks, side, grid4 | {"parallel.stages": "2"})
    layer = {"parallel.halo": "layer", "parallel.mesh": mesh, "tiling.grid": "2"}
    yield Case(
        f"L3 c16 instance norm, 512 px, {ranks} ranks", "layer", ranks, 512, _SMALL | layer | {"model.norm": "instance"}
    )
    if ranks == 2:
        deep, two = "L4 c8, 768 px, 2 ranks", {"tiling.grid": "2"}
        yield Case(deep, "read, grid 2", 2, 768, _DEEP | two)
        yield Case(deep, "layer", 2, 768, _DEEP | layer)
        yield Case(
            deep,
            "2 stages, gpipe, grid 3",
            2,
            768,
            _DEEP | {"tiling.grid": "3", "parallel.stages": "2", "parallel.schedule": "gpipe"},
        )
        yield Case("L3 c32, 384 px, 2 ranks", "read, grid 2", 2, 384, _WIDE | two)
        yield Case("L3 c32, 384 px, 2 ranks", "layer", 2, 384, _WIDE | layer)
        yield Case("L4 c8 instance norm, 768 px, 2 ranks", "layer", 2, 768, _DEEP | layer | {"model.norm": "instance"})
        yield Case("L3 c16 bf16, 512 px, 2 ranks", "read, grid 2", 2, 512, _SMALL | two | {"train.precision": "bf16"})
