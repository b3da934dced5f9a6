"""Policies of memory: what is kept, what is rebuilt, and that each rebuilt tensor can be."""

from __future__ import annotations

import pytest

from tiledseg.architecture.presets import KINDS
from tiledseg.architecture.unet import UNet
from tiledseg.geometry.graph import REBUILD
from tiledseg.geometry.memory_policy import asked, can_rebuild, held, keep_all, makers, recomputation


def test_what_is_kept_of_the_standard_network() -> None:
    """Of a U-Net the skips, and the ends of the levels."""
    graph = UNet(3, norm="batch").graph()
    ends = {f"{part}.conv1" for part in ("encoder0", "encoder1", "bottom", "decoder1")}
    there = held(graph, recomputation(graph))
    assert {name for name, is_held in zip(graph.names, there, strict=True) if is_held} == {"input", *ends}


@pytest.mark.parametrize("name", KINDS)
def test_policies_fit_every_network(name: str) -> None:
    graph = KINDS[name]().graph()
    policy = recomputation(graph)
    for tensor, home in enumerate(graph.homes):
        assert policy.tensors[tensor] == policy.tensors[home]
        assert policy.tensors[tensor] != REBUILD or can_rebuild(graph, tensor)
    there = {home for home, is_held in enumerate(held(graph, policy)) if is_held}
    for home, nodes in enumerate(makers(graph)):
        sources = {graph.homes[source] for k in nodes for source in graph.sources[k]} - {home}
        if policy.tensors[home] == REBUILD and there.issuperset(sources):
            there.add(home)
    assert there.issuperset(home for home, nodes in enumerate(asked(graph)) if nodes), "all that backward passes need"
    assert sum(held(graph, policy)) < sum(held(graph, keep_all(graph)))
