"""Networks that nobody here wrote, from public packages, each traced: exact, and where; or refused, and why.

    python -m benchmarks.foreign_networks

writes the table of docs/own-network.md. `tests/tracing/test_foreign.py` holds each to the law. Packages that are not
installed are left out: `pip install --no-deps -r benchmarks/foreign-packages.txt`, none of which needs more than numpy
and torch for these networks.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tiledseg.errors import ConfigError
from tiledseg.geometry.halo import minimum_halo, network_footprint
from tiledseg.models.network import GraphNetwork
from tiledseg.planning.run.norms import exact_modes
from tiledseg.tracing.trace import trace


@dataclass(frozen=True)
class Foreign:
    """A network of a package: `build` makes it of the module `where`. `refused`: a word of why it is, where it is.
    `large`: it takes more than a few seconds over ranks."""

    package: str
    where: str
    build: Callable[[Any], nn.Module]
    bands: int = 3
    refused: str | None = None
    outputs: tuple[int, ...] | None = None
    large: bool = False

    def module(self) -> nn.Module:
        """It, with seeded weights, float64. Raises ImportError where the package is absent."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: nn.Module = self.build(importlib.import_module(self.where)).double()
        for each in found.modules():  # statistics as after some training
            if isinstance(each, nn.BatchNorm2d) and each.running_mean is not None and each.running_var is not None:
                each.running_mean.normal_(0, 0.1)
                each.running_var.uniform_(0.5, 1.5)
        return found

    def network(self) -> GraphNetwork:
        return trace(self.module(), self.bands, self.outputs)


MONAI, NNUNET, UNET = "monai.networks.nets", "dynamic_network_architectures.architectures.unet", "unet"
SIX = (4, 4, 8, 8, 8, 4)


@dataclass(frozen=True)
class _Options:
    """What nnU-Net's networks are told, of three stages."""

    norm: type[nn.Module] = nn.InstanceNorm2d
    more: dict[str, Any] = field(default_factory=dict)

    def __call__(self, kind: Any, **also: Any) -> nn.Module:
        made: nn.Module = kind(
            input_channels=3,
            n_stages=3,
            features_per_stage=(4, 8, 8),
            conv_op=nn.Conv2d,
            kernel_sizes=3,
            strides=(1, 2, 2),
            num_classes=2,
            conv_bias=True,
            norm_op=self.norm,
            norm_op_kwargs={"eps": 1e-5, "affine": True},
            nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
            **{"n_conv_per_stage_decoder": 1, **self.more, **also},
        )
        return made


def monai(name: str, *arguments: Any, **keywords: Any) -> Callable[[Any], nn.Module]:
    """How to make that network of MONAI's."""
    return lambda package: getattr(package, name)(*arguments, **keywords)


def _unet(**keywords: Any) -> Callable[[Any], nn.Module]:
    common = {"in_channels": 3, "out_classes": 2, "num_encoding_blocks": 3, "out_channels_first_layer": 4}
    return lambda package: package.UNet2D(**common, **keywords)


class Features(nn.Module):
    """The convolutional part of a classifier, and a head that maps pixels."""

    def __init__(self, classifier: nn.Module, channels: int) -> None:
        super().__init__()
        self.classifier, self.head = classifier, nn.Conv2d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.classifier.extract_features(x))  # type: ignore[operator]
        return nn.functional.interpolate(y, size=x.shape[2:], mode="nearest")


def _efficient(package: Any) -> nn.Module:
    kind = package.EfficientNet
    parts = ["r1_k3_s11_e1_i32_o16_se0.25", "r2_k3_s22_e6_i16_o24_se0.25", "r1_k5_s22_e6_i24_o40_se0.25"]
    utilities = importlib.import_module("efficientnet_pytorch.utils")
    options = utilities.GlobalParams(
        *(0.25, 1.0, None, 0.0, 2, 0.99, 1e-3, 0.0, 8, 4, True),
    )
    made = kind(utilities.BlockDecoder.decode(parts), options)
    return Features(made, made._conv_head.out_channels)


NETWORKS: dict[str, Foreign] = {
    "MONAI UNet": Foreign("monai", MONAI, monai("UNet", 2, 3, 2, (4, 8, 8), (2, 2), num_res_units=1), large=True),
    "MONAI UNet, batch norm": Foreign(
        "monai", MONAI, monai("UNet", 2, 3, 2, (4, 8, 8), (2, 2), num_res_units=2, norm="batch", dropout=0.1)
    ),
    "MONAI BasicUNet": Foreign("monai", MONAI, monai("BasicUNet", 2, 3, 2, SIX), large=True),
    "MONAI BasicUNet, pixel shuffle": Foreign(
        "monai", MONAI, monai("BasicUNet", 2, 3, 2, SIX, norm="batch", upsample="pixelshuffle"), large=True
    ),
    "MONAI BasicUNet, interpolation": Foreign(
        "monai", MONAI, monai("BasicUNet", 2, 3, 2, SIX, upsample="nontrainable")
    ),
    "MONAI BasicUNetPlusPlus": Foreign(
        "monai", MONAI, monai("BasicUNetPlusPlus", 2, 3, 2, SIX, norm="batch"), large=True
    ),
    "MONAI AttentionUnet": Foreign("monai", MONAI, monai("AttentionUnet", 2, 3, 2, (4, 8, 8), (2, 2)), large=True),
    "MONAI SegResNet": Foreign(
        "monai", MONAI, monai("SegResNet", 2, 8, 3, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1)), large=True
    ),
    "MONAI SegResNetDS": Foreign("monai", MONAI, monai("SegResNetDS", 2, 4, 3, 2, blocks_down=(1, 1, 1), norm="batch")),
    "MONAI VNet": Foreign("monai", MONAI, monai("VNet", 2, 4, 4), bands=4, refused="drops other things"),
    "MONAI DynUNet": Foreign(
        "monai",
        MONAI,
        monai("DynUNet", 2, 3, 2, (3, (1, 3), 3), (1, 2, 2), (2, 2), filters=(4, 8, 8), res_block=True),
        large=True,
    ),
    "MONAI HighResNet": Foreign("monai", MONAI, monai("HighResNet", 2, 3, 2), large=True),
    "MONAI RegUNet": Foreign("monai", MONAI, monai("RegUNet", 2, 3, 4, 2, out_channels=2)),
    "MONAI FlexibleUNet, ResNet-18": Foreign(
        "monai",
        MONAI,
        monai("FlexibleUNet", 3, 2, "resnet18", spatial_dims=2, decoder_channels=(16, 8, 8, 4, 4)),
        large=True,
    ),
    "MONAI DenseNet": Foreign("monai", MONAI, monai("DenseNet121", 2, 3, 2), refused="returns"),
    "MONAI SwinUNETR": Foreign(
        "monai", MONAI, monai("SwinUNETR", 3, 2, feature_size=12, spatial_dims=2), refused="at every size"
    ),
    "nnU-Net PlainConvUNet": Foreign(
        NNUNET.split(".")[0], NNUNET, lambda m: _Options()(m.PlainConvUNet, n_conv_per_stage=2)
    ),
    "nnU-Net PlainConvUNet, batch norm, dropout": Foreign(
        NNUNET.split(".")[0],
        NNUNET,
        lambda m: _Options(nn.BatchNorm2d, {"dropout_op": nn.Dropout2d, "dropout_op_kwargs": {"p": 0.1}})(
            m.PlainConvUNet, n_conv_per_stage=1
        ),
    ),
    "nnU-Net PlainConvUNet, deep supervision": Foreign(
        NNUNET.split(".")[0],
        NNUNET,
        lambda m: _Options(more={"deep_supervision": True})(m.PlainConvUNet, n_conv_per_stage=1),
        outputs=(0,),
    ),
    "nnU-Net ResidualEncoderUNet": Foreign(
        NNUNET.split(".")[0], NNUNET, lambda m: _Options()(m.ResidualEncoderUNet, n_blocks_per_stage=1)
    ),
    "nnU-Net ResidualUNet": Foreign(
        NNUNET.split(".")[0], NNUNET, lambda m: _Options(nn.BatchNorm2d)(m.ResidualUNet, n_blocks_per_stage=1)
    ),
    "unet UNet2D": Foreign(
        UNET, UNET, _unet(padding=1, normalization="batch", upsampling_type="conv", dropout=0.1), large=True
    ),
    "unet UNet2D, residual": Foreign(UNET, UNET, _unet(padding=1, residual=True, upsampling_type="conv")),
    "unet UNet2D, without padding": Foreign(UNET, UNET, _unet(upsampling_type="conv"), large=True),
    "EfficientNet features": Foreign("efficientnet_pytorch", "efficientnet_pytorch", _efficient),
    "kornia DexiNed": Foreign(
        "kornia",
        "kornia.models.dexined",
        lambda m: nn.Sequential(m.DexiNed(pretrained=False), nn.Conv2d(1, 2, 1)),
        large=True,
    ),
}


def main() -> None:
    print("| network | package | exact in | nodes | halo, alignment | or refused, since |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, foreign in NETWORKS.items():
        try:
            print(_row(name, foreign))
        except ImportError as error:
            print(f"left out: {name}: {error}")


def _row(name: str, foreign: Foreign) -> str:
    module = foreign.module()
    try:
        graph = trace(module, foreign.bands, foreign.outputs).graph
    except ConfigError as error:
        return f"| {name} | {foreign.package} | | | | {_short(str(error))} |"
    modes = {trains: exact_modes(graph, 4, trains) for trains in (True, False)}
    where = " and ".join(
        f"{'all modes' if len(found) == 3 else 'mode layer'} {'trained' if trains else 'mapped'}"
        for trains, found in modes.items()
    )
    where = where if modes[True] != modes[False] else where.split(" ")[0] + " " + where.split(" ")[1]
    halo = f"{max(minimum_halo(graph))}, {network_footprint(graph).alignment}"
    return f"| {name} | {foreign.package} | {where}; stages | {len(graph)} | {halo} | |"


def _short(reason: str) -> str:
    """The first refusal, without the place of files on this machine."""
    first = re.sub(r"/\S*/([\w-]+\.py)", r"\1", reason).split("; (2)")[0]
    return first.removeprefix("the module cannot be computed exactly on tiles: (1) ").replace("|", "/")


if __name__ == "__main__":
    main()
