"""What `parallel.auto` finds changes no result: it is the run that has the same keys by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.law.cases import one_rank
from tests.law.runs import changed, configuration, losses, run, summary
from tests.law.test_runs import CONSTANT
from tests.planning.test_machine import MEASURED
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.comm.mesh import Mesh
from tiledseg.config.parallel import FOUND
from tiledseg.config.run import Config, ParallelConfig, TilingConfig

pytestmark = pytest.mark.usefixtures("without_plots")

FREE_MESSAGES = {"latency": 1e-9, "bandwidth": 1e13}
DEAR_MESSAGES = {"latency": 1.0, "bandwidth": 1e6}


def machine(path: Path, link: dict[str, float]) -> str:
    """A file of one with such messages, that is always bound by computing."""
    figures = MEASURED["figures"] | {"launch": 1e-9, "links": {"host": link}}
    host = {"ranks": 8, "cores": 8, "threads": 1}
    path.write_text(json.dumps(MEASURED | {"host": host, "figures": figures}))
    return str(path)


def left_open(shared: Path, name: str, link: dict[str, float], **given: Any) -> Config:
    """A run that leaves to the program all but what is given."""
    free = [key for key in FOUND if key.removeprefix("parallel.") not in given]
    parallel = ParallelConfig(auto=free, machine=str(shared / f"machine-{link['latency']}.json"), **given)
    keys = {**CONSTANT, "train.validate_every": 9, "tiling": TilingConfig(), "parallel": parallel}
    return configuration(shared, name, keys)


def epochs(config: Config, count: int) -> Config:
    return changed(config, {"train.epochs": count})


def by_hand(config: Config, name: str) -> Config:
    """The run with what was found for it."""
    found = find_checkpoint(config.run.output).saved.found
    assert found is not None
    assert found.parallel.auto == []
    output = str(Path(config.run.output).parent / name)
    return replace(config, tiling=found.tiling, parallel=found.parallel, run=replace(config.run, output=output))


def no_search(*given: object, **named: object) -> None:
    raise AssertionError("what was found before is kept")


@pytest.mark.mpi
@pytest.mark.ranks(2)
def test_losses_are_those_of_what_was_found_given_by_hand(
    shared: Path, meshes: dict[str, Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after two epochs and gone on: on as many ranks without another search, on one rank with one."""
    mesh = meshes["gloo"]
    for link in (FREE_MESSAGES, DEAR_MESSAGES):
        path = shared / f"machine-{link['latency']}.json"
        mesh.on_root(lambda path=path, link=link: machine(path, link))
    expected = losses(
        mesh.on_root(
            lambda: run(
                configuration(shared, "auto-alone", {**CONSTANT, "train.validate_every": 9, "train.epochs": 3}),
                one_rank(),
            )
        )
    )

    config = epochs(left_open(shared, "auto-free", FREE_MESSAGES), 3)
    first = run(epochs(config, 2), mesh)
    told = summary(shared / "auto-free")
    assert losses(first) == pytest.approx(expected[:2], rel=1e-10)
    assert told["found"]["ranks"] == mesh.size
    assert told["grids"][0] == told["found"]["keys"]["tiling.grid"]
    assert told["parallel"]["halo"] == told["found"]["keys"]["parallel.halo"]
    assert told["found"]["keys"]["parallel.halo"] == ("layer" if mesh.size > 1 else "read"), "messages are free"
    with monkeypatch.context() as patch:
        patch.setattr("tiledseg.planning.search.search", no_search)
        whole = losses(run(config, mesh))
    hand = by_hand(config, "auto-hand")
    assert whole == losses(run(hand, mesh)), "to the last bit"
    assert whole == pytest.approx(expected, rel=1e-10)
    assert summary(shared / "auto-free")["found"] == told["found"]
    assert summary(shared / "auto-hand")["parallel"] == summary(shared / "auto-free")["parallel"]

    mesh.communicator.barrier()  # all have read what the next run writes anew
    onward = mesh.on_root(lambda: losses(run(epochs(config, 4), one_rank())))
    assert onward[:3] == whole
    found = find_checkpoint(config.run.output).saved.found
    assert found is not None
    assert found.ranks == 1


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [{"stages": 2, "schedule": "gpipe", "recompute": "always"}, {"halo": "exchange"}])
def test_what_is_given_is_kept_and_the_rest_found(given: dict[str, Any], shared: Path, meshes: dict[str, Mesh]) -> None:
    mesh = meshes["gloo"]
    mesh.on_root(lambda: machine(shared / f"machine-{DEAR_MESSAGES['latency']}.json", DEAR_MESSAGES))
    config = epochs(left_open(shared, f"auto-{'-'.join(given)}", DEAR_MESSAGES, **given), 2)
    found = losses(run(config, mesh))
    hand = by_hand(config, f"hand-{'-'.join(given)}")
    assert {key: getattr(hand.parallel, key) for key in given} == given
    assert found == losses(run(hand, mesh)), "to the last bit"
    assert (summary(Path(config.run.output))["pipeline"] is not None) == ("stages" in given)
