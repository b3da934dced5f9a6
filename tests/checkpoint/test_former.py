"""A checkpoint that an older version wrote (11c81f5), committed as it lay there: it loads, and its run goes on."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.crash.runs import step_losses
from tiledseg import train
from tiledseg.architecture.presets import KINDS, described
from tiledseg.checkpoint.folder import find_checkpoint
from tiledseg.checkpoint.saved_state import parse_state
from tiledseg.config.words import read_loss, read_policy

FORMER = Path(__file__).with_name("former")


def state_of_former() -> dict[str, Any]:
    path = find_checkpoint(FORMER / "run").path
    return json.loads((path / "manifest.json").read_text())["state"]


@pytest.mark.usefixtures("without_plots")
def test_a_run_of_an_older_version_goes_on_with_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of its eight steps are done; the other five are those that it made itself."""
    shutil.copytree(FORMER, tmp_path / "former")
    monkeypatch.chdir(tmp_path / "former")
    assert train.main(["--config", "run.yaml"]) == 0
    assert step_losses(Path("run")) == pytest.approx(step_losses(FORMER / "run"), rel=1e-10)
    assert find_checkpoint(Path("run")).saved.step == 8


@pytest.mark.parametrize("kind", [*KINDS, "alexnet", 3])
def test_a_checkpoint_is_of_a_known_kind_of_network(kind: Any) -> None:
    state, network = state_of_former(), KINDS.get(kind, KINDS["unet"])(bands=2, classes=2)
    words = {**json.loads(json.dumps(described(network))), "kind": kind}
    with nullcontext() if kind in KINDS else pytest.raises(KeyError):
        assert parse_state({**state, "network": words}).network == network


def test_keys_have_become_fields() -> None:
    """Those of a loss, of a policy, and of what is one word today."""
    state = state_of_former()
    found = parse_state(state).config
    assert (found.train.loss, read_policy(found.optimizer.policy)) == ("cross_entropy", ("cosine", {}))
    config = {group: dict(keys) for group, keys in state["config"].items()}
    config["train"] |= {"loss": {"cross_entropy": 1.0, "focal": 0.5}, "focal_gamma": 3.0, "edge_radius": 4}
    config["optimizer"] |= {"policy": "step", "step_size": 7, "gamma": 0.1, "power": 0.9}
    config["parallel"] |= {"auto": ["parallel.halo"]}
    config["data"] |= {"split": "64 px", "split_share": 0.3, "split_gap": "auto"}
    config["model"] |= {"image_mean": False, "edge_band": False}
    config["train"] |= {"sampling": "windows", "window": 16, "windows_per_step": 2, "window_halo": "none"}
    found = parse_state({**state, "config": config, "found": {"ranks": 2}}).config
    loss = read_loss(found.train.loss)
    assert (loss["focal"], loss["edges"]["radius"]) == ({"weight": 0.5, "gamma": 3.0}, 4)
    assert read_policy(found.optimizer.policy) == ("step", {"size": 7, "gamma": 0.1})
    assert found.parallel.halo == "read", "what a search at the start had found is left out"
    assert (found.data.split, found.model.arguments) == ({"blocks": "64 px", "share": 0.3}, {"image_mean": False})
    assert found.train.windows == {"size": 16, "per_step": 2, "halo": "none"}
    config["data"] |= {"split": None}
    assert parse_state({**state, "config": config}).config.data.split is None
