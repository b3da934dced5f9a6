"""The one line around somebody's loop: what it refuses, and networks as others write them, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tiledseg
from tests.foreign.modules import Somebody
from tests.memory.stores import offload
from tests.tracing.cases import NETWORKS, WRITTEN
from tiledseg.errors import ConfigError
from tiledseg.memory.file_store import FileStore
from tiledseg.memory.offload import Recomputing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": "much"}, "budget is 'much'; give 16GiB"),
        ({"budget": -1}, "budget is -1; give 16GiB"),
        ({"store_limit": "x"}, "store_limit is 'x'; give 16GiB"),
        ({"store": "host"}, "store is host, the memory beside a GPU's own"),
        ({"store": "/nowhere"}, "the store cannot be in /nowhere: No such file or directory"),
    ],
)
def test_what_cannot_be_is_refused_before_any_step(arguments: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        tiledseg.large_model_support(**{"store": tmp_path, **arguments})  # type: ignore[arg-type]


def steps(network: nn.Module, x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Losses, and the weights and buffers after `count` steps of an optimizer."""
    torch.manual_seed(5)  # of dropout
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    losses = []
    for _ in range(count):
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
        plain = steps(network, x, 3)
        with tiledseg.large_model_support(budget="6MiB", store=tmp_path) as support:
            found = steps(again, x, 3)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert support.figures.bytes_out > 0
    assert support.figures.peak_bytes <= 6 << 20
    assert list(tmp_path.iterdir()) == []


WITHOUT_PARTS = ("Mixed", "ChannelNorm", "Functions")  # layers and nothing between them and the whole


@pytest.mark.parametrize("name", WRITTEN)
def test_networks_as_others_write_them(tmp_path: Path, name: str) -> None:
    """Offloaded; and parts of them recomputed, with the rest offloaded."""
    network = NETWORKS[name].module()
    again, third = copy.deepcopy(network), copy.deepcopy(network)
    x = torch.randn(1, NETWORKS[name].bands, 64, 64, dtype=torch.float64)
    plain = steps(network, x, 2)
    with offload(tmp_path, 100_000, FileStore, least=1024) as moving:
        found = steps(again, x, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert moving.figures.bytes_out > 0
    if name in WITHOUT_PARTS:
        with pytest.raises(ConfigError, match="has no parts of several layers"):
            tiledseg.large_model_support(third, store=tmp_path)
        return
    with Recomputing(third, lambda: FileStore(tmp_path, 1 << 26), 0, 100_000, 1024) as support:
        found = steps(third, x, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert support.again_bytes > 0
