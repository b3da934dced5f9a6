"""Named networks: the paper's three, by depth, and the balance lists that it found by hand."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tiledseg.architecture.unet import UNet
from tiledseg.config import ModelConfig
from tiledseg.errors import ConfigError


@dataclass(frozen=True)
class Preset:
    """A named network, and the paper's layers per stage on 6 GPUs (doi 10.1145/3404397.3404468)."""

    levels: int
    balance: tuple[int, ...]
    norm: str = "instance"
    convs_per_level: int = 2


PRESETS = {
    "small": Preset(6, (14, 24, 30, 22, 12, 7)),
    "medium-2": Preset(7, (16, 26, 38, 26, 12, 11)),
    "large": Preset(8, (18, 30, 44, 30, 14, 13)),
}


def build_network(model: ModelConfig, bands: int, classes: int) -> UNet:
    """The network that a configuration names.

    Raises ConfigError for an unknown name, or for a key that a preset fixes and the configuration sets otherwise.
    """
    if model.name == "unet":
        options = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "name"}
        return UNet(bands=bands, classes=classes, **options)
    if model.name not in PRESETS:
        raise ConfigError(f"model.name is '{model.name}'; give unet or one of {', '.join(PRESETS)}")
    preset, default = PRESETS[model.name], ModelConfig()
    for key in ("levels", "convs_per_level", "norm"):
        given = getattr(model, key)
        if given not in (getattr(default, key), getattr(preset, key)):
            raise ConfigError(
                f"model.{key} is {given}, but the preset {model.name} has {getattr(preset, key)}; leave the key out, "
                "or set model.name to unet"
            )
    return UNet(
        levels=preset.levels,
        convs_per_level=preset.convs_per_level,
        kernel=model.kernel,
        base_channels=model.base_channels,
        padding=model.padding,
        norm=preset.norm,
        upsampling=model.upsampling,
        dropout=model.dropout,
        bands=bands,
        classes=classes,
    )
