"""The law of moving tensors, and of parts of somebody's module computed once more: every output, gradient, buffer and
random number is the same, bit for bit; and the one line around somebody's loop."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tiledseg
from tests.foreign.modules import Somebody
from tests.memory import zoo
from tests.memory.stores import SlowStore, offload, to_host
from tests.memory.zoo import ZOO, Tensors
from tiledseg.errors import ConfigError
from tiledseg.memory.allocations import AllocationMeter
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.mover import Mover
from tiledseg.memory.offload import Offload, Recomputing

ALL, NONE = 0, 1 << 62  # budgets under which everything is computed once more, and nothing


def same(found: Tensors, expected: Tensors) -> bool:
    assert len(found) == len(expected)
    alike = (a.dtype == b.dtype and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))
    equal = (torch.equal(a, b) and torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, expected, strict=True))
    return all(alike) and all(equal)


@pytest.mark.parametrize("name", ZOO)
def test_everything_is_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Nothing leaves; all that can; a part. Through a store whose reads overtake writes; and by way of the host, by
    lanes whose copies come as late as they may: what is read or given back too early is seen."""
    run = ZOO[name]
    expected = [run(step) for step in range(3)]
    whole = Offload(Mover, 1 << 40, 1)
    with whole:
        assert all(same(run(step), expected[step]) for step in range(3))
    assert whole.figures.bytes_out == 0
    peak = whole.figures.peak_bytes
    for budget, kind in ((0, SlowStore), (peak // 2, FileStore), (0, None), (peak // 2, None), (peak // 3, None)):
        moving = to_host(budget, budget % 7) if kind is None else offload(tmp_path, budget, kind)
        with moving:
            for step in range(3):
                assert same(run(step), expected[step]), f"step {step} with {budget} of {peak} bytes, {kind}"
        assert budget or moving.figures.bytes_out > 0


def again_bytes(support: Recomputing) -> int:
    """Bytes of a step that are not kept, but had from a second run."""
    return sum(max(part.bytes, part.in_step) for part in support._parts if not part.stays)


def recomputing(model: nn.Module, budget: int, store: Path | None = None) -> Recomputing:
    if store is None:
        return Recomputing(model, Mover, budget, NONE, 1)
    return Recomputing(model, lambda: FileStore(store, 1 << 26), budget, budget, 1)


@pytest.mark.parametrize("to_file", [False, True])
def test_the_zoo_is_the_same_bit_for_bit(to_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its cases that build networks; the rest has no parts."""
    tried: set[str] = set()
    build = zoo.module
    for name, run in ZOO.items():
        expected = [run(step) for step in range(2)]
        with ExitStack() as stack:

            def module(
                made: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, name: str = name
            ) -> nn.Module:
                network = build(made, dtype)
                try:
                    support = recomputing(network, ALL, tmp_path if to_file else None)
                except ConfigError:
                    return network
                tried.add(name)
                return stack.enter_context(support).model

            monkeypatch.setattr(zoo, "module", module)
            found = [run(step) for step in range(2)]
        monkeypatch.setattr(zoo, "module", build)
        assert all(same(a, b) for a, b in zip(found, expected, strict=True)), name
    assert len(tried) >= 10, tried


class Odd(nn.Module):
    """What may trip who runs it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Conv2d(4, 8, 3, padding=1))
        self.norm = nn.BatchNorm2d(8, momentum=None)  # moves by a counter
        self.last = nn.Conv2d(8, 4, 1)
        self.drop = nn.Dropout(0.3)
        self.calls = 0
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, flip: bool = False) -> dict[str, torch.Tensor]:
        self.calls += 1
        y = self.drop(self.norm(self.first(x)).relu()) * self.calls * scale
        y = y * (1 + random.random() + float(np.random.random()))
        self.seen = y.detach().mean()
        return {"out": self.last(y.flip(2) if flip else y), "seen": self.seen}


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()
        layers = nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 1)
        self.writes = nn.Sequential(*layers, nn.Sigmoid())
        self.many = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.odd(x, 0.5, flip=True)["out"] + self.odd(x)["out"]
        return self.many(self.writes(y * 1.5))


def steps(network: nn.Module, count: int = 3, between: Callable[[nn.Module], object] = lambda network: None) -> Tensors:
    """Losses, gradients and all that has moved."""
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)
    found: Tensors = []
    for step in range(count):
        x = torch.randn(2, 4, 12, 12, generator=torch.Generator().manual_seed(step), requires_grad=True)
        network.train()
        loss = network(x).square().sum()
        between(network)
        loss.backward()
        found += [loss.detach(), x.grad]  # type: ignore[list-item]
    found += [p.grad for p in network.parameters() if p.grad is not None]
    drawn = torch.tensor([random.random(), np.random.random(), torch.rand(())])
    return [*found, *network.state_dict().values(), drawn]


@pytest.mark.parametrize("between", [lambda network: None, nn.Module.eval], ids=["in training", "evaluated in between"])
def test_random_numbers_statistics_and_attributes_move_once(between: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(1)
    plain = Whole()
    again = copy.deepcopy(plain)
    expected = steps(plain, between=between)
    with recomputing(again, ALL) as support:
        found = steps(again, between=between)
    assert same(found, expected)
    assert again.odd.calls == plain.odd.calls == 6
    assert torch.equal(again.odd.seen, plain.odd.seen)  # type: ignore[arg-type]
    assert again_bytes(support) > 0
    assert not any("forward" in module.__dict__ for module in again.modules())
    assert again._forward_pre_hooks == {}


def test_what_fits_the_budget_is_kept() -> None:
    torch.manual_seed(1)
    network = Somebody(bands=4, width=8, norm=True)
    x = torch.randn(1, 4, 96, 96)
    found = {}
    for budget in (ALL, 2_800_000, NONE):
        peaks = []
        with recomputing(network, budget) as support:
            for _ in range(3):
                known = [t for p in network.parameters() for t in (p, p.grad) if t is not None]
                with AllocationMeter(known) as meter:
                    network(x).square().mean().backward()
                peaks.append(meter.peak)
        found[budget] = again_bytes(support), peaks[-1]
        assert support.figures.bytes_out == 0
    (most, least_peak), (some, _), (nothing, most_peak) = found.values()
    assert most > some > nothing == 0
    assert least_peak < 0.85 * most_peak


@pytest.mark.parametrize("budget", ["1MiB", "64MiB"])
def test_a_chain_of_small_blocks_holds_no_more_than_without_and_the_end_says_so(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block keeps its result alone, which the next block takes: no second run frees anything."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with tiledseg.large_model_support(Chain(), budget=budget) as support:
        support.model(torch.randn(1, 4, 256, 256)).sum().backward()
    assert (again_bytes(support), support.figures.peak_bytes) == (0, 6 << 20)
    said = capsys.readouterr().err.splitlines()
    held = "warning: autograd held 6.00 MiB, beyond the budget of 1.00 MiB; give store a folder on a local disk, or"
    assert said == ([f"{held} use a smaller batch"] if budget == "1MiB" else [])


def test_errors_stay_what_they_are() -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), *(nn.Linear(4, 4) for _ in range(20)))
    x = torch.randn(3, 4, requires_grad=True)
    with recomputing(network, ALL):
        middle = network[0](x)
        middle.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            middle.sum().backward()
        with pytest.raises(ZeroDivisionError), recomputing(network, ALL):
            raise ZeroDivisionError
        out = network(x)
        with torch.no_grad():
            network[0][0].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert not any("forward" in module.__dict__ for module in network.modules())


class Spoiling(nn.Module):
    """Writes over what its exponential has saved; its own, and a view of it."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.first, self.last, self.part = nn.Linear(4, 4), nn.Linear(4, 4), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).exp()
        y[self.part].add_(1)
        return self.last(y).sigmoid() * 2


@pytest.mark.parametrize("part", [slice(None), slice(1)])
def test_a_part_that_writes_over_what_it_has_saved_stays_an_error(part: slice) -> None:
    network = nn.Sequential(Spoiling(part), *(nn.Linear(4, 4) for _ in range(20)))
    for budget in (ALL, NONE):
        with recomputing(network, budget), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            network(torch.randn(3, 4)).sum().backward()


class Fickle(nn.Module):
    """Other layers at the second run."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Fickle.runs += 1
        return self.layers(x if Fickle.runs == 1 else x[:1]).exp()


def test_what_is_another_at_the_second_run_is_told() -> None:
    network = nn.ModuleDict({"one": Fickle()})
    network.forward = lambda x: network["one"](x)  # type: ignore[method-assign]
    with recomputing(network, ALL):
        out = network(torch.randn(3, 4))
        with pytest.raises(RuntimeError, match=r"a second run of ModuleDict.one has kept .* leave model out"):
            out.sum().backward()


def test_who_looks_at_layers_sees_them_once() -> None:
    network = Whole()
    seen: list[int] = []
    for layer in (network.odd.norm, network.many[3]):
        layer.register_forward_hook(lambda *_: seen.append(1))
    with recomputing(network, ALL):
        steps(network, 1)
    assert len(seen) == 3, "the first layer is called twice in a step"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": nn.Linear(2, 2)}, "model is Linear, which has no parts of several layers .* leave model out"),
        ({"model": "unet"}, "model is unet; give nn.Module"),
        ({"model": torch.jit.script(nn.Sequential(nn.Linear(2, 2)))}, "is a module of torch.jit.* leave model out"),
        ({"budget": "much"}, "budget is 'much'; give 16GiB"),
        ({"budget": -1}, "budget is -1; give 16GiB"),
        ({"store_limit": "x"}, "store_limit is 'x'; give 16GiB"),
        ({"store": "host"}, "store is host, which is for tensors of a GPU"),
        ({"store": "/nowhere"}, "the store cannot be in /nowhere: No such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_before_any_step(arguments: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        tiledseg.large_model_support(**{"store": tmp_path, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def loop(
    network: nn.Module, x: torch.Tensor, count: int, begin: Callable[[], object] = lambda: None
) -> list[torch.Tensor]:
    """Losses, and the weights and buffers after `count` steps of an optimizer, each after a call of `begin`."""
    torch.manual_seed(5)  # of dropout
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(count):
        begin()
        out = network(x)
        loss = (out if isinstance(out, torch.Tensor) else out[0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *network.state_dict().values()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loop_ends_with_the_same_weights(tmp_path: Path, precision: str) -> None:
    torch.manual_seed(3)
    network = Somebody(bands=3, width=8, norm=True)
    again, x = copy.deepcopy(network), torch.randn(2, 3, 192, 192)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        plain = loop(network, x, 3)
        with tiledseg.large_model_support(budget="6MiB", store=tmp_path) as support:
            found = loop(again, x, 3)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert support.figures.bytes_out > 0
    assert support.figures.peak_bytes <= 6 << 20
    assert list(tmp_path.iterdir()) == []
