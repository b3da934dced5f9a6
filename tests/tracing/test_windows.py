"""Declared leaves: their declarations are checked; ranks send strips of half a window, and compute no window twice.

`test_foreign` holds `SmallSwin` (tests/tracing/windows.py) and Swins of timm and MONAI to the law.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import tiledseg
from tests.spatial.test_block_network import in_blocks
from tests.spatial.thread_ranks import on_ranks
from tests.spatial.twins import Result, difference, forward, undivided
from tests.tracing.windows import WINDOW, Block, DropPath
from tiledseg.comm.mesh import Axes
from tiledseg.errors import ConfigError, GeometryError
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.geometry.memory_policy import recomputation
from tiledseg.geometry.sharing.decomposition import Partition
from tiledseg.geometry.sharing.layer_windows import WHOLE
from tiledseg.models.dropout import DropoutKey, set_dropout_key
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.walk.cost import rank_walk
from tiledseg.planning.walk.rank_steps import rank_steps
from tiledseg.spatial.network import SpatialNetwork
from tiledseg.tracing import declared


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declarations end with the test."""
    monkeypatch.setattr(declared, "_DECLARED", dict(declared._DECLARED))


@pytest.fixture(scope="module")
def small() -> GraphNetwork:
    """Two blocks, the second shifted, between convolutions of stride 2."""
    return _traced(Block(6, 0), Block(6, 2))


class Last(nn.Module):
    """A module between images whose channels come last."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.parts, self.up = (
            nn.Conv2d(3, 6, 2, stride=2),
            nn.Sequential(*parts),
            nn.ConvTranspose2d(6, 2, 2, 2),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.up(self.parts(self.first(x_BCHW).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def _traced(*parts: nn.Module, trains: bool = True) -> GraphNetwork:
    torch.manual_seed(0)
    return tiledseg.trace(Last(*parts).double().train(trains), bands=3)


class Inner(nn.Module):
    """A leaf of images whose channels come last, by a module of images."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BHWC.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


WINDOWS, LOCAL, PIXEL = tiledseg.Windows, tiledseg.Local, tiledseg.PerPixel


def test_what_is_no_declaration() -> None:
    for kind, stated in ((Block, 4), (Block, WINDOWS), (WINDOWS, PIXEL()), (Block(6, 0), PIXEL())):
        with pytest.raises(ConfigError, match="declare takes"):
            tiledseg.declare(kind, stated)  # type: ignore[arg-type]
    tiledseg.declare(Block, WINDOWS(4, 4))
    with pytest.raises(ConfigError, match="give a size above its shift"):
        _traced(Block(6, 0))


class Depths(nn.Module):
    """Stochastic depth twice: 1 and 3 times an image."""

    def __init__(self, depth: nn.Module) -> None:
        super().__init__()
        self.depth = depth

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        return self.depth(x_BHWC) + 3 * self.depth(x_BHWC)


@pytest.mark.parametrize("declares", [True, False])
def test_each_image_and_call_has_a_draw_of_its_own(declares: bool) -> None:
    """Whatever images are beside it, inside of a leaf too; another one at the next step; all of it in evaluation."""
    if declares:
        tiledseg.declare(Depths, PIXEL())
    first = nn.Conv2d(2, 2, 1)
    nn.init.zeros_(first.weight), nn.init.ones_(first.bias)
    network = tiledseg.trace(nn.Sequential(first, Depths(DropPath(0.5))), bands=2)
    assert (len(network.graph) == 2) == declares
    x_BCHW, keys = torch.zeros(32, 2, 4, 4), [DropoutKey(1, 2, image) for image in range(32)]
    set_dropout_key(network, *keys)
    y_BCHW = network(x_BCHW)
    assert set(y_BCHW.unique().tolist()) == {0.0, 2.0, 6.0, 8.0}
    assert bool((y_BCHW == y_BCHW[:, :1, :1, :1]).all())
    set_dropout_key(network, *keys[5:9])
    assert torch.equal(network(x_BCHW[5:9]), y_BCHW[5:9])
    set_dropout_key(network, *(replace(key, step=3) for key in keys))
    assert not torch.equal(network(x_BCHW), y_BCHW)
    assert network.eval()(x_BCHW).unique().tolist() == [4.0]


class StrangeDropPath(DropPath):
    """A stochastic depth of no known package."""


class UnscaledDropPath(DropPath):
    """A stochastic depth that does not scale images."""

    __module__ = "timm.layers.drop"
    scale_by_keep = False


class OfParts(nn.Module):
    """Stochastic depth of each row of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = DropPath(0.5)

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        return self.depth(x_BHWC.flatten(0, 1)).unflatten(0, x_BHWC.shape[:2])


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("module", [StrangeDropPath(0.5), UnscaledDropPath(0.5), OfParts()])
def test_other_draws_are_mapped_and_not_trained(module: nn.Module, declares: bool) -> None:
    if declares:
        tiledseg.declare(type(module), PIXEL())
    assert _traced(module, trains=False).untrained
    with pytest.raises(ConfigError, match="in training"):
        _traced(module)


def test_dropout_in_a_leaf_is_mapped_and_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"'parts.0' .*drops at random; set the rate"):
        _traced(Block(6, 2, drop=0.1), trains=False).train()
    with pytest.raises(ConfigError, match="drops at random"):
        _traced(Block(6, 2, drop=0.1))


def test_windows_align_tiles_and_the_halo_is_what_gradients_reach(small: GraphNetwork) -> None:
    """Windows of 4 at stride 2: tiles begin at multiples of 8. Half a window of the second block is in whole ones of
    the first."""
    before, after = minimum_halo(small.graph)
    assert (before, after, network_footprint(small.graph).alignment) == (8, 8, 8)
    x_BCHW = torch.randn(1, 3, 64, 64, dtype=torch.float64).requires_grad_()
    (gradient_BCHW,) = torch.autograd.grad(small(x_BCHW)[:, :, 24:40, 24:40].square().sum(), x_BCHW)
    seen = (gradient_BCHW.abs().amax((0, 1)) > 1e-15).nonzero()
    assert seen.min(0).values.tolist() == [24 - before] * 2
    assert seen.max(0).values.tolist() == [39 + after] * 2


UNEVEN = [((0, 16, 48), (0, 24, 40)), ((0, 21, 48), (0, 40)), ((0, 48), (0, 5, 27, 40)), ((0, 8, 40, 48), (0, 32, 40))]


def _check(network: GraphNetwork, size: tuple[int, int], *edges: tuple[int, ...], fusion: int = 1) -> None:
    """Outputs, and gradients of the input and of all weights; each message has two ends, each rank the same calls."""
    x_BCHW, cuts = torch.randn(2, 3, *size, dtype=torch.float64), (Partition(edges[0]), Partition(edges[1]))
    expected = undivided(network, x_BCHW)

    def work(axes: Axes) -> Result:
        run = forward(network, x_BCHW, axes, *cuts, fusion)
        assert run is not None
        run.backward(expected.y_BCHW.shape)
        return run.finish(x_BCHW.shape, expected.y_BCHW.shape)

    for found in on_ranks(cuts[0].parts, cuts[1].parts, work):
        assert difference(found, expected) is None


@pytest.mark.parametrize(("rows", "cols"), UNEVEN)
@pytest.mark.parametrize("fusion", [1, 2, WHOLE])
def test_ranks_give_what_the_whole_image_gives(
    small: GraphNetwork, rows: tuple[int, ...], cols: tuple[int, ...], fusion: int
) -> None:
    _check(small, (48, 40), rows, cols, fusion=fusion)


@pytest.mark.parametrize(
    ("leaf", "stated"),
    [
        (nn.Conv2d(6, 24, 4, stride=2, padding=1), LOCAL(1, 2)),
        (nn.Conv2d(6, 24, (1, 6), stride=2, padding=(0, 2)), LOCAL((0, 2), 2)),
        (nn.Conv2d(6, 24, 2, stride=2), WINDOWS(2)),
    ],
)
def test_a_declared_convolution_is_one(leaf: nn.Module, stated: object) -> None:
    """Strided, and with another reach along columns; what gives half as many pixels is no windows' module."""
    tiledseg.declare(Inner, stated)  # type: ignore[arg-type]
    part = nn.Sequential(Inner(leaf), Shuffled())
    if isinstance(stated, WINDOWS):
        with pytest.raises(ConfigError, match="is declared as Windows"):
            _traced(part)
        return
    for cuts in (((0, 16, 48), (0, 40)), ((0, 21, 48), (0, 5, 40))):
        _check(_traced(part), (48, 40), *cuts)


class Shuffled(nn.Module):
    """Channels of a pixel become pixels."""

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        return nn.functional.pixel_shuffle(x_BHWC.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)


class Written(nn.Module):
    """A leaf that is given a mask of the image's size, which is written in parts, as MONAI's blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.w = Given(), nn.Parameter(torch.rand(6))

    def forward(self, x_BHWC: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(1, *x_BHWC.shape[1:3], 1, dtype=x_BHWC.dtype)
        mask[:, -2:] = 1
        return self.leaf(x_BHWC * self.w, mask)


class Given(nn.Module):
    def forward(self, x_BHWC: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x_BHWC + 0 * mask[:, :1, :1]


def test_a_mask_that_is_written_has_a_memory_of_its_own_at_any_size() -> None:
    """In runs without values too, where the image's memory would reach over all other."""
    tiledseg.declare(Given, PIXEL(), lambda module, height, width: (torch.zeros(1, height, width, 1),))
    assert not _traced(Written()).untrained


def test_windows_that_are_moved_by_more_than_half() -> None:
    """The first rank then may have less than a window; windows of 5 x 5 at stride 2."""
    network = _traced(Block(6, 2, window=5), Block(6, 4, window=5))
    for rows, cols in (((0, 10, 60), (0, 30, 40)), ((0, 13, 33, 60), (0, 17, 40)), ((0, 50, 60), (0, 10, 20, 40))):
        _check(network, (60, 40), rows, cols)


@pytest.mark.parametrize(("rows", "cols"), UNEVEN)
def test_blocks_give_what_the_whole_image_gives(
    small: GraphNetwork, rows: tuple[int, ...], cols: tuple[int, ...]
) -> None:
    x_BCHW = torch.randn(1, 3, 48, 40, dtype=torch.float64)
    found = in_blocks(small, x_BCHW, lambda _: (Partition(rows), Partition(cols)))
    assert difference(found, undivided(small, x_BCHW)) is None


def test_a_shifted_block_sends_a_strip_there_and_back(small: GraphNetwork) -> None:
    """Half a window by the width of the image, one way each; as planned, and no window is computed twice."""
    x_BCHW, rows, cols = torch.randn(1, 3, 48, 40), Partition((0, 24, 48)), Partition((0, 40))
    network = copy.deepcopy(small).float()
    steps = [
        [rank_steps(g, cut)[at] for g, cut, at in ((network.graph, rows, r), (network.graph, cols, 0))] for r in (0, 1)
    ]
    walks = [rank_walk(network.graph, 3, *each, 2, 4) for each in steps]

    def work(axes: Axes) -> list[int]:
        sent, post = list[int](), axes.point_to_point.start
        axes.point_to_point.start = lambda sends, receives: (  # type: ignore[method-assign]
            sent.extend(tensor.nbytes for _, tensor in sends) or post(sends, receives)
        )
        assert axes.position is not None
        SpatialNetwork(network, axes)(x_BCHW[:, :, rows.blocks[axes.position.row].slice], rows, cols)
        return sent

    strip = 2 * 20 * 6 * 4  # rows, columns, channels, bytes
    assert on_ranks(2, 1, work) == [[strip], [strip]]
    assert [walk.sent for walk in walks] == [[strip]] * 2
    whole = sum(walk.work for walk in walks)
    alone = rank_walk(network.graph, 3, rank_steps(network.graph, Partition((0, 48)))[0], steps[0][1], 1, 4).work
    assert whole == alone


def test_windows_that_do_not_fill_the_image_are_refused(small: GraphNetwork) -> None:
    x_BCHW = torch.randn(1, 3, 44, 40, dtype=torch.float64)
    with pytest.raises(GeometryError, match="its windows of 4 do not fill 22 positions; give another size"):
        on_ranks(2, 1, lambda axes: SpatialNetwork(small, axes).output(Partition((0, 16, 44)), Partition((0, 40))))
    assert small(x_BCHW[:, :, :40]).shape[2] == 40


class Deep(nn.Module):
    """Windows on patches so large that the first sizes of a trace do not fill them, as in the deep levels of Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block, self.head = nn.Conv2d(3, 12, 16, 16), Block(12, 2), nn.ConvTranspose2d(12, 2, 16, 16)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.patches(x_BCHW).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


def test_a_trace_takes_sizes_that_fill_the_deepest_windows() -> None:
    assert network_footprint(tiledseg.trace(Deep().eval(), 3).graph).alignment == 16 * WINDOW


def test_a_leaf_runs_again(small: GraphNetwork) -> None:
    """Its tensors are dropped and made again; gradients have the same bits."""
    x_BCHW, network = torch.randn(1, 3, 48, 40, dtype=torch.float64), copy.deepcopy(small)
    network.follow(recomputation(small.graph))
    found = []
    for each in (small, network):
        each.zero_grad()
        each(x_BCHW).square().sum().backward()
        found.append([p.grad.clone() for p in each.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
