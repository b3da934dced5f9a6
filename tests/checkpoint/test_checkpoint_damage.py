"""Checkpoints: found damaged where they are, and nothing in them can run."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiledseg
from tests.checkpoint.saved import FILES, make_network, save
from tiledseg.checkpoint import folder as module
from tiledseg.checkpoint.folder import (
    find_checkpoint,
)
from tiledseg.checkpoint.loading import load_network, load_optimizer
from tiledseg.config.run import OptimizerConfig
from tiledseg.errors import CheckpointError
from tiledseg.training.optimizer import build_optimizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole"), 2)


@settings(
    derandomize=True, max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(FILES), at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_a_changed_byte_or_a_cut_is_found(
    whole: Path, tmp_path: Path, name: str, at: float, flip: int, cut: bool
) -> None:
    """Only the manifest's white space may change: its content is then still the same."""
    path = tmp_path / "step-000002"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(whole, path)
    data = bytearray((path / name).read_bytes())
    place = int(at * len(data))
    if cut:
        del data[place:]
    else:
        data[place] ^= flip
    (path / name).write_bytes(data)
    error, state = attempt(path)
    assert "\n" not in error
    assert error or (name == "manifest.json" and state == find_checkpoint(whole).state)


def attempt(path: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with a checkpoint, or its state."""
    try:
        return "", find_checkpoint(path).state
    except CheckpointError as error:
        return str(error), {}


@pytest.mark.parametrize(
    "content", ["null", "[]", "3", '"text"', "{}", '{"format": 1}', '{"format": 1, "state": null}']
)
def test_a_manifest_of_another_kind_is_refused(whole: Path, tmp_path: Path, content: str) -> None:
    path = shutil.copytree(whole, tmp_path / "step-000002")
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        find_checkpoint(path)


def test_latest_cannot_lead_elsewhere(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").write_text(f"{whole}\n")
    with pytest.raises(CheckpointError, match="no checkpoint's name"):
        find_checkpoint(tmp_path)


class Bomb:
    """Leaves a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


@pytest.mark.parametrize("name", FILES[:2])
def test_a_pickle_with_the_right_checksum_is_not_run(whole: Path, tmp_path: Path, name: str) -> None:
    path, trace = shutil.copytree(whole, tmp_path / "step-000002"), tmp_path / "trace"
    (path / name).write_bytes(pickle.dumps(Bomb(trace)))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("own_checksum")
    manifest["checksums"][name] = module.sha256(path / name)
    manifest["own_checksum"] = module.own_checksum(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    network = make_network()
    optimizer = build_optimizer(network.parameters(), OptimizerConfig())
    saved = find_checkpoint(path)
    with pytest.raises(CheckpointError, match=name):
        load_network(saved, network) if name == FILES[0] else load_optimizer(saved, optimizer)
    assert not trace.exists()
    os.close(pickle.loads(pickle.dumps(Bomb(trace))))
    assert trace.exists(), "the bomb of this test is none"


def test_no_module_reads_pickles() -> None:
    """Objects travel between the ranks of one job only, through torch.distributed and mpi4py."""
    sources = sorted(Path(next(iter(tiledseg.__path__))).rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        text = path.read_text()
        if path.name == "loading.py":  # torch's files as weights only, and what the reader raises for others
            for known in ("import pickle\n", "pickle.UnpicklingError", 'torch.load(path, "cpu", weights_only=True)'):
                assert text.count(known) == 1
                text = text.replace(known, "")
        if path.name == "state.py":  # writes the state of generators, to compare it
            text = text.replace("import pickle\n", "", 1).replace("pickle.dumps(", "", 1)
        if path.name == "zarr_store.py":  # refuses a store's codec of that name
            text = text.replace("Not pickle, which", "", 1)
        found = re.findall(r"torch\.load\b|\bpickle\b|\bmarshal\b|\beval\(|\bexec\(|allow_pickle", text)
        found = [word for word in found if word != "eval("] + re.findall(r"(?<![.\w])eval\(", text)
        assert not found, f"{path}: {found}"
