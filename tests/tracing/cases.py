"""A foreign network as a case of the law: the whole raster against its tiles, in all modes and in stages."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from benchmarks.foreign_networks.networks import MANY
from benchmarks.foreign_networks.networks import NETWORKS as PACKAGED
from benchmarks.foreign_networks.networks import Foreign as Source
from tests.conftest import NIGHTLY
from tests.law.cases import Case
from tests.tracing.networks import AlignedUNet, Mixed, Outer, PaddingUNet, Pointed, Squeezed
from tests.tracing.styles import STYLES
from tests.tracing.times import temporal
from tests.tracing.windows import Scanning, SmallSwin
from tiledseg.geometry.graph import Graph
from tiledseg.models.network import GraphNetwork, with_channels_last

T = TypeVar("T")
HERE = "tests.tracing.styles"
WRITTEN = {
    style.__name__: Source("tests", HERE, lambda _, style=style: Outer(style(8), classes=2))
    for style in (Pointed, Squeezed, Mixed, Scanning, *STYLES.values())
} | {
    unet.__name__: Source("tests", HERE, lambda _, unet=unet: unet(classes=2))
    for unet in (PaddingUNet, AlignedUNet, SmallSwin)
}
WRITTEN |= {
    f"TemporalUNet{', no norms' * exact}": Source("tests", HERE, lambda _, exact=exact: temporal(exact), bands=6)
    for exact in (False, True)
}
NETWORKS = PACKAGED | WRITTEN | (MANY if os.environ.get("FOREIGN_NETWORKS") == "many" else {})


@dataclass(frozen=True)
class Foreign:
    """What a case asks of a network, for one of `benchmarks.foreign_networks`."""

    name: str
    classes: int = 2
    norm: str = "its own"

    @property
    def bands(self) -> int:
        return NETWORKS[self.name].bands

    def graph(self) -> Graph:
        return traced(self.name).graph


def installed(foreign: Source, make: Callable[[], T]) -> T:
    """Return what `make` returns; skip, with the reason, where the package of `foreign` is absent."""
    try:
        return make()
    except ImportError as error:
        pytest.skip(f"{foreign.package} is not installed ({error}); see benchmarks/foreign-networks.md")


@functools.lru_cache
def traced(name: str) -> GraphNetwork:
    """Raises pytest's skip where the package is absent. By day tests alone compare graphs."""
    with pytest.MonkeyPatch.context() as patch:
        if not NIGHTLY:
            patch.setattr("tiledseg.tracing.trace.check_traced", lambda *_: None)
        return installed(NETWORKS[name], NETWORKS[name].network)


@dataclass(frozen=True)
class ForeignCase(Case):
    """As `Case`; every network has weights of its own, the same ones."""

    @property
    def raster(self) -> tuple[int, int]:
        unit = self.footprint.alignment
        if unit > 100:  # windows of a deep Swin: as few as 4 x 2 tiles need
            return 3 * unit + 1, unit + 3
        return max(min(self.footprint.before, 40), 3 * unit) + 4 * unit + 1, 3 * unit + 3

    def network(self, dtype: torch.dtype = torch.float64) -> GraphNetwork:
        again = copy.deepcopy(traced(self.unet.name)).to(dtype)
        again.form = None  # outputs as a network of ours gives them, in no list or dict of the module's
        return with_channels_last(again)  # type: ignore[no-any-return]


COUNTED = list[int]()


def count() -> int:
    """Count its calls."""
    COUNTED.append(1)
    return len(COUNTED)
