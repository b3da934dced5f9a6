"""The kinds of networks by their words in a checkpoint; and the paper's three networks with their balance lists."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from tiledseg.architecture.gated_scnn import GatedSCNN
from tiledseg.architecture.network import ForeignNetwork, Network
from tiledseg.architecture.residual_unet import ResidualUNet
from tiledseg.architecture.segnet import SegNet
from tiledseg.architecture.unet import UNet
from tiledseg.config.checks import AUTO, shown
from tiledseg.config.run import CROPS, ModelConfig
from tiledseg.config.words import NETWORKS, PRESET_NAMES
from tiledseg.errors import ConfigError
from tiledseg.geometry.layers.declared import CropGrid

KINDS: dict[str, type[Any]] = dict(zip(NETWORKS, (UNet, SegNet, ResidualUNet, GatedSCNN), strict=True))
"""The dataclass of each kind, whose fields are numbers, text, booleans, or tuples of these."""
SAVED: dict[str, type[Any]] = {**KINDS, "foreign": ForeignNetwork}
"""The kinds that a checkpoint may hold."""
FIRST = "unet"  # the kind of a record without one


@dataclass(frozen=True)
class Preset:
    """A named U-Net, and the paper's layers a stage on 6 GPUs (doi 10.1145/3404397.3404468)."""

    levels: int
    balance: tuple[int, ...]
    norm: str = "instance"
    convs_per_level: int = 2


_BALANCES = (14, 24, 30, 22, 12, 7), (16, 26, 38, 26, 12, 11), (18, 30, 44, 30, 14, 13)
PRESETS = {name: Preset(6 + k, _BALANCES[k]) for k, name in enumerate(PRESET_NAMES)}
OF_TRAINING = ("freeze_norm",)  # keys for the training of any network


def build_network(model: ModelConfig, bands: int, classes: int) -> Network:
    """Return the network that a configuration names; keys set to `auto` get the published values.

    Raises ConfigError for an unknown name, for a set key that the network does not have, or for a set value other than
    the preset's.
    """
    preset, default = PRESETS.get(model.name), ModelConfig()
    if not model.build and model.name not in (*KINDS, *PRESETS):
        raise ConfigError(f"model.name is '{model.name}'; give {', '.join(KINDS)}, or one of {', '.join(PRESETS)}")
    kind: type[Any] | None = None if model.build else KINDS.get(model.name, UNet)
    own = {field.name for field in fields(kind)} if kind else {"build", "arguments", "series", "verify", *CROPS}
    more = own - {"bands", "classes"}.union(vars(default)) if kind else set()  # fields of this network alone
    for field in fields(ModelConfig):
        key, value = field.name, getattr(model, field.name)
        if value == getattr(default, key) or key in OF_TRAINING or (kind and key == "name"):
            continue
        what = f"model.{key} is {value}, but "
        if kind is None and key not in own:
            raise ConfigError(f"{what}{model.build} builds the network; leave it out, or say it in model.arguments")
        if key == "pretrained" and not hasattr(kind, "file_names"):
            raise ConfigError(f"{what}no encoder of {model.name} is published; leave it out")
        if key not in own and key != "pretrained" and not (key == "arguments" and more.issuperset(value)):
            raise ConfigError(f"{what}{model.name} has no such choice; leave the key out")
        if kind and value != getattr(preset, key, value):
            has = f"the preset {model.name} has {getattr(preset, key)}"
            raise ConfigError(f"{what}{has}; leave the key out, or set model.name to unet")
    if kind is None:
        return ForeignNetwork.of(str(model.build), model.arguments, bands, classes, crop_grid(model), model.series)
    options = {key: value for key, value in asdict(model).items() if key in own and value != AUTO} | model.arguments
    if wrong := [name for name, value in model.arguments.items() if not isinstance(value, bool)]:
        raise ConfigError(f"model.arguments: {wrong[0]} is {shown(model.arguments[wrong[0]])}; give true or false")
    if preset is not None:
        options |= {key: getattr(preset, key) for key in ("levels", "convs_per_level", "norm")}
    return kind(**options, bands=bands, classes=classes)


def crop_grid(model: ModelConfig) -> CropGrid | None:
    """Return the crop grid of a module of one input size; None if the configuration has no window."""
    return None if model.window is None else CropGrid(model.window, model.overlap, model.blend, model.ends)


def described(network: Network) -> dict[str, Any]:
    """Return the network for JSON: its fields, and its kind unless that is `FIRST`. Raises TypeError for others."""
    kind = next((word for word, each in SAVED.items() if type(network) is each), None)
    if kind is None:
        raise TypeError(f"no kind of network is {type(network).__name__}; add it to KINDS")
    given = {key: value for key, value in asdict(cast(Any, network)).items() if value is not None}
    return ({} if kind == FIRST else {"kind": kind}) | given
