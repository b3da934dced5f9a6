"""What a mesh decides from the facts of its ranks, and how ranks share results and errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tiledseg.comm.failure import is_agreed
from tiledseg.comm.mesh import Facts, Mesh, choose_transport, fair_threads
from tiledseg.errors import CommunicationError, ConfigError, InputError, LabelError, RasterError
from tiledseg.memory.device import local_device


def node(host: str, gpus: list[str | None], cores: int = 4, backend: str = "nccl") -> list[Facts]:
    return [Facts(host, (1 << cores) - 1, gpu, backend if gpu else None) for gpu in gpus]


OWN_GPUS = [*node("a", ["a0", "a1"]), *node("b", ["b0", "b1"])]
SHARED_GPU = [*node("a", ["a0", "a1"]), *node("b", ["b0", "b0"])]
NO_GPU_ON_ONE = [*node("a", ["a0", "a1"]), *node("b", [None, None])]
OWN_XPUS = node("a", ["a0", "a1"], backend="xccl")
TWO_KINDS = [*node("a", ["a0", "a1"]), *node("b", ["b0"], backend="xccl")]


@pytest.mark.parametrize(
    ("asked", "facts", "expected"),
    [
        ("auto", OWN_GPUS, "nccl"),
        ("auto", SHARED_GPU, "gloo"),
        ("auto", NO_GPU_ON_ONE, "gloo"),
        ("auto", node("a", [None]), "gloo"),
        ("gloo", OWN_GPUS, "gloo"),
        ("mpi", SHARED_GPU, "mpi"),
        ("nccl", OWN_GPUS, "nccl"),
        ("auto", OWN_XPUS, "xccl"),
        ("xccl", OWN_XPUS, "xccl"),
        ("auto", TWO_KINDS, "gloo"),
    ],
)
def test_transport(asked: str, facts: list[Facts], expected: str) -> None:
    assert choose_transport(asked, facts) == expected


def test_nccl_that_cannot_be() -> None:
    for facts in (NO_GPU_ON_ONE, TWO_KINDS):
        with pytest.raises(ConfigError, match="needs a CUDA or ROCm GPU on every rank but rank 2 on b has none"):
            choose_transport("nccl", facts)
    with pytest.raises(ConfigError, match="transport xccl needs an XPU GPU on every rank but rank 0 on a has none"):
        choose_transport("xccl", TWO_KINDS)
    with pytest.raises(ConfigError, match="ranks 2 and 3 share one on b"):
        choose_transport("nccl", SHARED_GPU)


@pytest.mark.parametrize(
    ("facts", "threads"),
    [
        ([Facts("a", 0b1111, None)] * 2 + [Facts("b", 0b1111, None)] * 4, [2, 2, 1, 1, 1, 1]),
        ([Facts("a", 0b0011, None), Facts("a", 0b1100, None)], [2, 2]),  # bound to cores of their own
        ([Facts("a", 0b11, None)] * 3, [1, 1, 1]),
    ],
)
def test_ranks_of_a_host_share_its_cores(facts: list[Facts], threads: list[int]) -> None:
    assert [fair_threads(rank, facts) for rank in range(len(facts))] == threads


@pytest.mark.parametrize(("kind", "float64", "index"), [("cuda", True, 3), ("xpu", True, 3), ("xpu", False, None)])
def test_device_of_a_rank(monkeypatch: pytest.MonkeyPatch, kind: str, float64: bool, index: int | None) -> None:
    """A rank takes the GPU of its local rank; MPS, and an XPU without float64, are passed over."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(kind))
    module = getattr(torch, kind)
    monkeypatch.setattr(module, "get_device_properties", lambda *_: SimpleNamespace(has_fp64=float64))
    monkeypatch.setattr(module, "device_count", lambda: 6)
    cpu = torch.device("cpu")
    assert local_device(3) == (cpu if index is None else torch.device(kind, index))
    monkeypatch.setattr(module, "device_count", lambda: 1)
    assert local_device(3) == (cpu if index is None else torch.device(kind, 0))
    for other in (None, torch.device("mps")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, other=other: other)
        assert local_device(3) == cpu


@pytest.mark.mpi
def test_on_root_gives_every_rank_the_result_or_the_error(mesh: Mesh) -> None:
    """Nobody waits for a root that has crashed."""
    calls: list[int] = []

    def ask() -> dict[str, int]:
        calls.append(mesh.rank)
        return {"rank": mesh.rank}

    def fail() -> None:
        raise RasterError(f"a.tif is missing, says {mesh.rank}")

    assert mesh.on_root(ask) == {"rank": 0}
    assert calls == ([0] if mesh.is_root else [])
    with pytest.raises(RasterError, match=r"^a\.tif is missing, says 0$") as caught:
        mesh.on_root(fail)
    assert is_agreed(caught.value)
    with pytest.raises(ZeroDivisionError if mesh.is_root else CommunicationError) as crashed:
        mesh.on_root(lambda: 1 // 0)
    assert not is_agreed(crashed.value)


@pytest.mark.mpi
def test_the_lowest_ranks_error_is_raised_everywhere(mesh: Mesh) -> None:
    assert mesh.on_all(lambda: mesh.rank) == mesh.rank
    mine: list[InputError] = [LabelError("zero"), RasterError("one"), ConfigError("two"), ConfigError("three")]

    def fail(lowest: int) -> None:
        if mesh.rank >= lowest:
            raise mine[mesh.rank % 4]

    for lowest in range(min(mesh.size, 4)):
        with pytest.raises(type(mine[lowest])) as caught:
            mesh.on_all(lambda lowest=lowest: fail(lowest))
        assert str(caught.value) == str(mine[lowest])
        assert is_agreed(caught.value)
