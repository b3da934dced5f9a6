"""Edits of a checkpoint after which its checksums are right again: what somebody can write, and no run does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tiledseg.checkpoint.check import own_checksum, sha256

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
Change = Callable[[Path], None]


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    """`change` works on the manifest."""

    def edit(step: Path) -> None:
        manifest = json.loads((step / "manifest.json").read_text())
        change(manifest)
        _seal(step, manifest)

    return edit


def in_state(change: Callable[[dict[str, Any]], object]) -> Change:
    """`change` works on the manifest's state."""
    return in_manifest(lambda manifest: change(manifest["state"]))


def in_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    """`change` works on the tensors of a file."""

    def edit(step: Path) -> None:
        tensors = load_file(step / name)
        change(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, step / name)
        reseal(step)

    return edit


def reseal(step: Path) -> None:
    """Right checksums for the files as they are."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["checksums"] = {name: sha256(step / name) for name in (MODEL, OPTIMIZER)}
    _seal(step, manifest)


def _seal(step: Path, manifest: dict[str, Any]) -> None:
    manifest.pop("own_checksum", None)
    manifest = json.loads(json.dumps(manifest))
    (step / "manifest.json").write_text(json.dumps({**manifest, "own_checksum": own_checksum(manifest)}))


def first(tensors: dict[str, torch.Tensor], end: str = "") -> torch.Tensor:
    """The first tensor whose name ends so."""
    return next(tensor for name, tensor in sorted(tensors.items()) if name.endswith(end))


def header(step: Path, size: int) -> None:
    """Weights of which the header says that it is so long."""
    with (step / MODEL).open("r+b") as file:
        file.write(size.to_bytes(8, "little"))
    reseal(step)


def pipe(path: Path) -> None:
    """A FIFO with nobody at its other end."""
    path.unlink()
    os.mkfifo(path)


def _rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


def _replace(tensors: dict[str, torch.Tensor], end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if name.endswith(end))
    tensors[name] = change(tensors[name])


def _set(keys: str, value: Any) -> Change:
    def change(state: dict[str, Any]) -> None:
        *path, last = keys.split(".")
        for key in path:
            state = state[key]
        state[last] = value

    return in_state(change)


def _drop(keys: str) -> Change:
    def change(state: dict[str, Any]) -> None:
        *path, last = keys.split(".")
        for key in path:
            state = state[key]
        del state[last]

    return in_state(change)


STATES: tuple[tuple[str, Change, str], ...] = (
    ("epoch-too-far", _set("position.epoch", 10**9), "epoch 1000000000"),
    ("epoch-negative", _set("position.epoch", -1), "epoch -1"),
    ("epoch-a-float", _set("position.epoch", 0.0), "state.position.epoch is 0.0, not a whole number"),
    ("epoch-true", _set("position.epoch", True), "state.position.epoch is True, not a whole number"),
    ("epoch-huge", _set("position.epoch", 10**30), "state.position.epoch is 1000"),
    ("position-a-list", _set("position", [0, 1]), "state.position is [0, 1], not a map"),
    ("position-with-more", _set("position.tile", 3), "state.position.tile is unknown"),
    ("position-gone", _drop("position"), "state.position is missing"),
    ("step-text", _set("step", "2"), "state.step is '2', not a whole number"),
    ("step-of-another-folder", _set("step", 7), "state.step 7"),
    ("marks-falling", _set("marks", [[0, 0], [1, 9]]), "state.marks"),
    ("marks-of-three", _set("marks", [[0, 0, 0]]), "state.marks"),
    ("marks-late", _set("marks", [[1, 1]]), "state.marks"),
    ("network-a-list", _set("network", []), "state.network is [], not a map"),
    ("network-unknown", _set("network.colour", 1), "state.network.colour is unknown"),
    ("network-incomplete", _drop("network.padding"), "state.network.padding is missing"),
    ("levels-text", _set("network.levels", "two"), "state.network.levels is 'two', not a whole number"),
    ("levels-none", _set("network.levels", 0), "model.levels is 0"),
    ("levels-other", _set("network.levels", 3), "alone"),
    ("channels-huge", _set("network.base_channels", 1 << 60), "base_channels is 1152921504606846976"),
    ("all-huge", in_state(lambda s: s["network"].update(levels=12, base_channels=1 << 20)), "cannot be built"),
    ("units-huge", _set("network.convs_per_level", 10**12), "convs_per_level is 1000000000000"),
    ("kernel-null", _set("network.kernel", None), "state.network.kernel is None"),
    ("dropout-nan", _set("network.dropout", float("nan")), "model.dropout is nan"),
    ("padding-other", _set("network.padding", "reflect"), "model.padding"),
    ("config-null", _set("config", None), "state.config is None, not a map"),
    ("config-group-a-list", _set("config.data", []), "state.config.data is [], not a map"),
    ("config-unknown-group", _set("config.colour", {}), "state.config.colour is unknown"),
    ("config-unknown-key", _set("config.train.colour", 1), "state.config.train.colour is unknown"),
    ("config-without-bands", _drop("config.data.bands"), "state.config.data.bands is missing"),
    ("bands-text", _set("config.data.bands", "red"), "state.config.data.bands is 'red'"),
    ("bands-zero", _set("config.data.bands", [0]), "data.bands is [0]"),
    ("ignore-index-text", _set("config.data.ignore_index", "255"), "state.config.data.ignore_index is '255'"),
    ("ignore-index-too-large", _set("config.data.ignore_index", 300), "data.ignore_index is 300"),
    ("nodata-list", _set("config.data.nodata", [1]), "state.config.data.nodata is [1], not a number or null"),
    ("optimizer-other", _set("config.optimizer.name", "lion"), "state.config.optimizer.name is 'lion'"),
    ("normalization-null", _set("normalization", None), "state.normalization is None"),
    ("std-zero", _set("normalization.std", [1.0, 0.0, 1.0]), "state.normalization.std"),
    ("std-nan", _set("normalization.std", [1.0, float("nan"), 1.0]), "state.normalization.std"),
    ("std-negative", _set("normalization.std", [1.0, -2.0, 1.0]), "state.normalization.std"),
    ("mean-infinite", _set("normalization.mean", [float("inf")] * 3), "state.normalization.mean"),
    ("mean-short", _set("normalization.mean", [0.0]), "state.normalization.mean has 1 values"),
    ("mean-text", _set("normalization.mean", "none"), "state.normalization.mean is 'none'"),
    ("constant-out-of-range", _set("normalization.constant", [7]), "state.normalization.constant is [7]"),
    ("sampling-list", _set("sampling", []), "state.sampling is [], not a map"),
)

MANIFESTS: tuple[tuple[str, Change, str], ...] = (
    ("state-a-list", in_manifest(lambda m: m.update(state=[])), "the manifest.state is [], not a map"),
    ("state-gone", in_manifest(lambda m: m.pop("state")), "the manifest.state is missing"),
    ("step-gone", in_manifest(lambda m: m.pop("step")), "the manifest.step is missing"),
    ("checksums-text", in_manifest(lambda m: m.update(checksums="none")), "the manifest.checksums is 'none'"),
    ("checksums-numbers", in_manifest(lambda m: m.update(checksums={MODEL: 1})), "the manifest.checksums is {"),
    ("groups-null", in_manifest(lambda m: m.update(optimizer_groups=None)), "the manifest.optimizer_groups is None"),
    (
        "groups-of-numbers",
        in_manifest(lambda m: m.update(optimizer_groups=[1])),
        "the manifest.optimizer_groups is [1]",
    ),
    (
        "groups-without-params",
        in_manifest(lambda m: m.update(optimizer_groups=[{}])),
        "an optimizer group.params is None",
    ),
    ("groups-of-fewer", in_manifest(lambda m: m["optimizer_groups"][0]["params"].pop()), "optimizer_groups"),
    ("unknown-key", in_manifest(lambda m: m.update({"colour\nred": 1})), "is unknown"),
    ("format-text", in_manifest(lambda m: m.update(format="one")), "format 'one'"),
)

TENSORS: tuple[tuple[str, Change, str], ...] = (
    ("weights-nan", in_tensors(MODEL, lambda t: first(t).view(-1)[0].fill_(float("nan"))), "not finite"),
    ("weights-infinite", in_tensors(MODEL, lambda t: first(t).view(-1)[0].fill_(float("inf"))), "not finite"),
    ("weights-half", in_tensors(MODEL, lambda t: _replace(t, "", lambda v: v.half())), "torch.float16"),
    ("weights-whole-numbers", in_tensors(MODEL, lambda t: _replace(t, "", lambda v: v.int())), "torch.int32"),
    (
        "weights-of-other-shape",
        in_tensors(MODEL, lambda t: _replace(t, "", lambda v: v.repeat(2, 1, 1, 1)[:5])),
        "is (",
    ),
    ("weights-fewer", in_tensors(MODEL, lambda t: t.pop(min(t))), "is in the network alone"),
    ("weights-more", in_tensors(MODEL, lambda t: t.update({"odd": torch.ones(1)})), "'odd' is in the file alone"),
    ("weights-none", in_tensors(MODEL, lambda t: t.clear()), "tensors"),
    ("header-huge", lambda step: header(step, 1 << 40), "model.safetensors"),
    ("header-beyond-64-bits", lambda step: header(step, (1 << 64) - 1), "model.safetensors"),
    ("moments-nan", in_tensors(OPTIMIZER, lambda t: first(t, "exp_avg").view(-1)[0].fill_(float("nan"))), "not finite"),
    ("moments-negative", in_tensors(OPTIMIZER, lambda t: first(t, "exp_avg_sq").view(-1)[0].fill_(-1.0)), "below 0"),
    ("moments-of-other-shape", in_tensors(OPTIMIZER, lambda t: _replace(t, "exp_avg", lambda v: v.view(-1))), "is ("),
    ("moments-double", in_tensors(OPTIMIZER, lambda t: _replace(t, "exp_avg", lambda v: v.double())), "torch.float64"),
    ("moments-missing", in_tensors(OPTIMIZER, lambda t: t.pop("0.exp_avg")), "'0.exp_avg' of the optimizer is missing"),
    ("count-negative", in_tensors(OPTIMIZER, lambda t: first(t, "step").fill_(-3.0)), "below 0"),
    ("count-a-vector", in_tensors(OPTIMIZER, lambda t: _replace(t, ".step", lambda v: v.repeat(2))), "is (2,)"),
    ("index-a-word", in_tensors(OPTIMIZER, lambda t: _rename(t, "0.step", "zero.step")), "of the optimizer"),
    ("index-too-large", in_tensors(OPTIMIZER, lambda t: _rename(t, "0.step", "99.step")), "of the optimizer"),
)

IRREGULAR: tuple[tuple[str, Change, str], ...] = (
    ("manifest-a-fifo", lambda step: pipe(step / "manifest.json"), "manifest.json is a FIFO"),
    ("weights-a-fifo", lambda step: pipe(step / MODEL), f"{MODEL} is a FIFO"),
    ("weights-a-folder", lambda step: ((step / MODEL).unlink(), (step / MODEL).mkdir())[1], f"{MODEL} is a folder"),
    ("optimizer-to-nowhere", lambda step: _link(step / OPTIMIZER, "nowhere"), f"{OPTIMIZER} is missing"),
    ("weights-to-a-device", lambda step: _link(step / MODEL, "/dev/zero"), f"{MODEL} is a character device"),
    ("manifest-to-itself", lambda step: _link(step / "manifest.json", "manifest.json"), "manifest.json"),
    ("manifest-nested", lambda step: (step / "manifest.json").write_text("[" * 100_000) and None, "manifest.json"),
)


def _link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


ALL = (*STATES, *MANIFESTS, *TENSORS, *IRREGULAR)
