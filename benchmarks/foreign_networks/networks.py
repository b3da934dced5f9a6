"""Networks that nobody here wrote, from public packages: how each is built, and what it is known for.

`NETWORKS` are small ones, `MANY` those of segmentation-models-pytorch, timm and more of MONAI, `REAL` those that
`tests/tracing/test_foreign.py` runs over ranks. Packages that are not installed are left out: `pip install --no-deps -r
benchmarks/foreign-packages.txt`, none of which needs more than numpy and torch for these networks. Where others cannot
be imported (timm imports torchvision for its transforms), a stand-in is there meanwhile, of which nothing is used.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.stand_ins import stand_ins
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.trace import trace


@dataclass(frozen=True)
class Foreign:
    """A network of a package: `build` makes it of the module `where`. `refused`: a word of why it is, where it is.
    `maps`: it is in training, not in evaluation. `large`: it takes more than a few seconds over ranks."""

    package: str
    where: str
    build: Callable[[Any], nn.Module]
    bands: int = 3
    refused: str | None = None
    outputs: tuple[int, ...] | None = None
    large: bool = False
    maps: bool = False
    size: tuple[int, int] | None = None
    tiles: bool = False

    def module(self) -> nn.Module:
        """It, with seeded weights, float64. Raises ImportError where the package is absent."""
        torch.manual_seed(0)
        with warnings.catch_warnings(), nullcontext() if self.package == "transformers" else stand_ins():
            warnings.simplefilter("ignore")
            found: nn.Module = self.build(importlib.import_module(self.where)).double()
        for each in found.modules():  # statistics as after some training, and no attention hidden by norms of weight 0
            weight = getattr(each, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 1 and not weight.any():
                weight.data.uniform_(0.5, 1.5)
            if isinstance(each, nn.BatchNorm2d) and each.running_mean is not None and each.running_var is not None:
                each.running_mean.normal_(0, 0.1)
                each.running_var.uniform_(0.5, 1.5)
        return found.train(not self.maps)

    def network(self) -> GraphNetwork:
        return trace(self.module(), self.bands, self.outputs)


MONAI, NNUNET, UNET = "monai.networks.nets", "dynamic_network_architectures.architectures.unet", "unet"
SIX = (4, 4, 8, 8, 8, 4)


def made(where: str, expression: str, **more: Any) -> Foreign:
    """The network that an expression makes, in the words of the module `where` and of this one."""
    return Foreign(where.split(".")[0], where, lambda m: eval(expression, {**globals(), **vars(m), "hf": m}), **more)


def nnunet(kind: Any, norm: type[nn.Module] = nn.InstanceNorm2d, **more: Any) -> nn.Module:
    """A network of nnU-Net's, of three stages."""
    options = {"input_channels": 3, "n_stages": 3, "features_per_stage": (4, 8, 8), "conv_op": nn.Conv2d}
    options |= {"kernel_sizes": 3, "strides": (1, 2, 2), "num_classes": 2, "conv_bias": True, "norm_op": norm}
    options |= {"norm_op_kwargs": {"eps": 1e-5, "affine": True}, "nonlin": nn.LeakyReLU}
    options |= {"nonlin_kwargs": {"inplace": True}, "n_conv_per_stage_decoder": 1}
    return kind(**options, **more)


def unet2d(kind: Any, **more: Any) -> nn.Module:
    """A network of the package unet."""
    network: nn.Module = kind(
        in_channels=3, out_classes=2, num_encoding_blocks=3, out_channels_first_layer=4, upsampling_type="conv", **more
    )
    return network


class Features(nn.Module):
    """The convolutional part of a classifier, and a head that maps pixels."""

    def __init__(self, classifier: nn.Module, channels: int) -> None:
        super().__init__()
        self.classifier, self.head = classifier, nn.Conv2d(channels, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.classifier.extract_features(x))  # type: ignore[operator]
        return nn.functional.interpolate(y, size=x.shape[2:], mode="nearest")


def efficient(kind: Any, utilities: Any) -> nn.Module:
    """The features of a small EfficientNet."""
    parts = ["r1_k3_s11_e1_i32_o16_se0.25", "r2_k3_s22_e6_i16_o24_se0.25", "r1_k5_s22_e6_i24_o40_se0.25"]
    options = utilities.GlobalParams(*(0.25, 1.0, None, 0.0, 2, 0.99, 1e-3, 0.0, 8, 4, True))
    network = kind(utilities.BlockDecoder.decode(parts), options)
    network.set_swish(memory_efficient=False)  # the other has a backward pass of its own
    return Features(network, network._conv_head.out_channels)


DROPS = {"dropout_op": nn.Dropout2d, "dropout_op_kwargs": {"p": 0.1}}
_DYN = "DynUNet(2, 3, 2, (3, (1, 3), 3), (1, 2, 2), (2, 2), filters=(4, 8, 8), res_block=True)"
_RES = "SegResNet(2, 8, 3, 2, blocks_down=(1, 1, 1), blocks_up=(1, 1))"
_RES_DS = "SegResNetDS(2, 4, 3, 2, blocks_down=(1, 1, 1), norm='batch')"
_FLEXIBLE = "FlexibleUNet(3, 2, 'resnet18', spatial_dims=2, decoder_channels=(16, 8, 8, 4, 4))"
_UNET = "UNet(2, 3, 2, (4, 8, 8), (2, 2), num_res_units="
NETWORKS: dict[str, Foreign] = {
    "MONAI UNet": made(MONAI, f"{_UNET}1)", large=True),
    "MONAI UNet, batch norm": made(MONAI, f"{_UNET}2, norm='batch', dropout=0.1)"),
    "MONAI BasicUNet": made(MONAI, "BasicUNet(2, 3, 2, SIX)", large=True),
    "MONAI BasicUNet, pixel shuffle": made(
        MONAI, "BasicUNet(2, 3, 2, SIX, norm='batch', upsample='pixelshuffle')", large=True
    ),
    "MONAI BasicUNet, interpolation": made(MONAI, "BasicUNet(2, 3, 2, SIX, upsample='nontrainable')"),
    "MONAI BasicUNetPlusPlus": made(MONAI, "BasicUNetPlusPlus(2, 3, 2, SIX, norm='batch')", large=True),
    "MONAI AttentionUnet": made(MONAI, "AttentionUnet(2, 3, 2, (4, 8, 8), (2, 2))", large=True),
    "MONAI SegResNet": made(MONAI, _RES, large=True),
    "MONAI SegResNetDS": made(MONAI, _RES_DS),
    "MONAI VNet": made(MONAI, "VNet(2, 4, 4)", bands=4, refused="drops other things"),
    "MONAI DynUNet": made(MONAI, _DYN, large=True),
    "MONAI HighResNet": made(MONAI, "HighResNet(2, 3, 2)", large=True),
    "MONAI RegUNet": made(MONAI, "RegUNet(2, 3, 4, 2, out_channels=2)"),
    "MONAI FlexibleUNet, ResNet-18": made(MONAI, _FLEXIBLE, large=True),
    "MONAI DenseNet": made(MONAI, "DenseNet121(2, 3, 2)", refused="returns"),
    "MONAI SwinUNETR": made(
        MONAI, "SwinUNETR(3, 2, feature_size=12, spatial_dims=2, window_size=4)", size=(256, 256), large=True
    ),
    "nnU-Net PlainConvUNet": made(NNUNET, "nnunet(PlainConvUNet, n_conv_per_stage=2)"),
    "nnU-Net PlainConvUNet, batch norm, dropout": made(
        NNUNET, "nnunet(PlainConvUNet, nn.BatchNorm2d, n_conv_per_stage=1, **DROPS)"
    ),
    "nnU-Net PlainConvUNet, deep supervision": made(
        NNUNET, "nnunet(PlainConvUNet, deep_supervision=True, n_conv_per_stage=1)", outputs=(0,)
    ),
    "nnU-Net ResidualEncoderUNet": made(NNUNET, "nnunet(ResidualEncoderUNet, n_blocks_per_stage=1)"),
    "nnU-Net ResidualUNet": made(NNUNET, "nnunet(ResidualUNet, nn.BatchNorm2d, n_blocks_per_stage=1)"),
    "unet UNet2D": made(UNET, "unet2d(UNet2D, padding=1, normalization='batch', dropout=0.1)", large=True),
    "unet UNet2D, residual": made(UNET, "unet2d(UNet2D, padding=1, residual=True)"),
    "unet UNet2D, without padding": made(UNET, "unet2d(UNet2D)", large=True),
    "EfficientNet features": made("efficientnet_pytorch", "efficient(EfficientNet, utils)"),
    "kornia DexiNed": made(
        "kornia.models.dexined", "nn.Sequential(DexiNed(pretrained=False), nn.Conv2d(1, 2, 1))", large=True
    ),
}


SMP = "segmentation_models_pytorch"
DECODERS = ["Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus"]
DECODERS += ["UPerNet", "Segformer", "DPT"]
ENCODERS = ["tu-resnet18", "tu-mobilenetv2_050", "efficientnet-b0", "tu-densenet121", "tu-regnetx_002", "tu-gernet_s"]
ENCODERS += ["tu-convnext_atto", "mit_b0"]
OF_FEW_MEANS = ("PSPNet", "PAN", "DeepLabV3", "DeepLabV3Plus", "UPerNet")  # batch norms that torch trains on batches
UNBUILT = {("DPT", "efficientnet-b0"), ("DPT", "mit_b0"), ("DeepLabV3", "mit_b0"), ("PAN", "mit_b0")}
UNBUILT |= {("UnetPlusPlus", "mit_b0"), ("Linknet", "mit_b0")}
UNBUILT |= {(decoder, "tu-densenet121") for decoder in ("PAN", "DeepLabV3", "DeepLabV3Plus")}


def smp(decoder: str, encoder: str) -> Foreign:
    """A decoder on an encoder. Its own encoders ResNet, MobileNet and DenseNet are torchvision's: timm's stand here."""
    refused = "numbers that depend on the size of the image" if decoder == "MAnet" else None
    maps = decoder in OF_FEW_MEANS or encoder == "efficientnet-b0"  # which drops whole layers, by a function
    return made(SMP, f"{decoder}('{encoder}', encoder_weights=None, classes=2)", refused=refused, maps=maps)


class Levels(nn.Module):
    """A backbone of features, and the sum of a head on each level, brought to the size of the image."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleList(nn.Conv2d(channels, 2, 1) for channels in backbone.feature_info.channels())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x[:, :1] * 0
        for head, y in zip(self.heads, self.backbone(x), strict=True):
            y = y if y.shape[1] == head.in_channels else y.permute(0, 3, 1, 2)
            total = total + nn.functional.interpolate(head(y), x.shape[2:])
        return total


def timm(name: str, **more: Any) -> Foreign:
    """The features of that backbone of timm's."""
    return made("timm", f"Levels(create_model('{name}', features_only=True))", **more)


# Smallest of a family each. `EXACT` are in training too, `MAPS` drop whole layers there or norm few means of an image.
_EXACT = """mobileone_s1 convnext_zepto_rms cs3darknet_focus_s cspnext_tiny densenet121 dla46x_c dpn48b mnasnet_small
fasternet_t0 fastvit_t8 ghostnet_050 hardcorenas_b hrnet_w18_small inception_next_atto lcnetv2_small mambaout_femto
mobilenetv3_small_050 nf_regnet_b0 poolformerv2_s12 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50
resnet10t resnetv2_18 selecsls42 starnet_s050 xception41p iformer_t lowformer_b0 pvt_v2_b0 shvit_s1 edgenext_xx_small"""
EXACT = _EXACT.split()
MAPS = ["focalnet_tiny_srf", "resnest14d", "rexnet_100", "skresnet18"]
FIXED = ["efficientformer_l1", "efficientformerv2_s0", "gcvit_xxtiny", "swin_tiny_patch4_window7_224", "visformer_tiny"]
REFUSED = {
    **dict.fromkeys(FIXED, "a size is fixed in it"),
    **dict.fromkeys(("hgnetv2_b0", "legacy_seresnet18", "ese_vovnet19b_slim_dw"), "pools with ceil_mode"),
    "efficientvit_b0": "keep the dtype of the network",
    "tresnet_m": "takes pixels apart",
}
MANY: dict[str, Foreign] = {f"smp {d}, {e}": smp(d, e) for d in DECODERS for e in ENCODERS if (d, e) not in UNBUILT} | {
    f"timm {name}": timm(name) for name in EXACT
}
MANY |= {f"timm {name}": timm(name, maps=True) for name in MAPS}
XCIT = "Levels(create_model('xcit_nano_12_p8_224', features_only=True, depth=3))"
MANY |= {f"timm {name}": timm(name, refused=why) for name, why in REFUSED.items()}
MANY |= {
    "MONAI AutoEncoder": made(MONAI, "AutoEncoder(2, 3, 2, (4, 8, 8), (2, 2, 1))"),
    "MONAI MedNeXt": made(MONAI, "MedNeXt(2, 8, 3, 2, (1, 1, 1, 1), blocks_up=(1, 1, 1, 1))"),
    "MONAI SegResNetVAE": made(
        MONAI, "SegResNetVAE((64, 96), spatial_dims=2, in_channels=3, out_channels=2)", maps=True
    ),
    "MONAI Quicknat": made(MONAI, "Quicknat(2, 3, 8)"),
    "MONAI UNETR": made(MONAI, "UNETR(3, 2, (96, 96), 8, 24, 48, 4, spatial_dims=2)", refused="a size is fixed in it"),
}

NETWORKS["timm MobileNet v3"] = timm("mobilenetv3_small_050", large=True)
NETWORKS["smp Unet, MiT-B0"] = smp("Unet", "mit_b0")


_SWIN = "strict_img_size=False, drop_path_rate=0.0, embed_dim=12, "  # of any size, without stochastic depth
_SMALL = "img_size=64, patch_size=2, depths=(2, 2), num_heads=(2, 3), window_size=4, out_indices=(0, 1)"
for name, swin in {"Swin": "swin_tiny_patch4_window7_224", "Swin v2": "swinv2_tiny_window8_256"}.items():
    NETWORKS[f"timm {name}"] = made("timm", f"Levels(create_model('{swin}', features_only=True, {_SWIN}{_SMALL}))")
MANY |= {
    f"smp {d}, Swin": made(
        SMP,
        f"{d}('tu-swin_tiny_patch4_window7_224', encoder_weights=None, classes=2, {_SWIN}num_heads=(1, 2, 2, 2))",
        maps=d == "UPerNet",
    )
    for d in ("Unet", "FPN", "UPerNet")
}


class Scores(nn.Module):
    """The scores of a network of transformers, at the size of the image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.network(x).logits, x.shape[2:], mode="bilinear")


HF = "transformers"
_ANY = "encoder_weights=None, classes=2, strict_img_size=False, drop_path_rate=0.0"
_THIN = f"{_ANY}, embed_dim=24, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8)"
_SLIM = f"{_ANY}, img_size=64, patch_size=2, window_size=4, embed_dim=8, depths=(2, 1, 1, 1), num_heads=(1, 2, 2, 2)"
_WIDE = _SLIM.replace("embed_dim=8", "embed_dim=16")  # scse divides channels by 16
_THREE = "decoder_channels=(64, 32, 16, 8, 8)"
_SWIN_T, _SWIN2_T = "'tu-swin_tiny_patch4_window7_224'", "'tu-swinv2_tiny_window8_256'"
_SEGFORMER = "hf.SegformerConfig(num_labels=2, drop_path_rate=0.0, classifier_dropout_prob=0.0"
_STAGES = "out_features=['stage1', 'stage2', 'stage3', 'stage4']"
_UPER = (
    "Scores(hf.UperNetForSemanticSegmentation(hf.UperNetConfig(num_labels=2, hidden_size=32, use_auxiliary_head=False"
)


def shared(where: str, expression: str, height: int, width: int, **more: Any) -> Foreign:
    """A network that `tests/tracing/test_foreign.py` runs over ranks, on an image of that size."""
    return made(where, expression, size=(height, width), **more)


# In published widths (-T, -B0) or thinner ones.
REAL: dict[str, Foreign] = {
    "smp Unet, Swin, patches of 2": shared(
        SMP,
        f"Unet({_SWIN_T}, encoder_depth=2, decoder_channels=(16, 16), decoder_attention_type='scse', {_WIDE})",
        96,
        128,
    ),
    "smp Unet, Swin, patches of 2, mapped": shared(
        SMP, f"Unet({_SWIN_T}, encoder_depth=2, decoder_channels=(8, 8), {_SLIM})", 96, 96, maps=True, tiles=True
    ),
    "timm Swin, patches of 2": shared(
        "timm",
        f"Levels(create_model({_SWIN_T.replace('tu-', '')}, features_only=True, {_SWIN}{_SMALL}))",
        128,  # of 112 rows a tile has 96, at which `Levels` takes rows for channels
        144,
        tiles=True,
    ),
    "timm Swin v2, patches of 2": shared(
        "timm",
        f"Levels(create_model({_SWIN2_T.replace('tu-', '')}, features_only=True, {_SWIN}{_SMALL}))",
        128,  # of 112 rows a tile has 96, at which `Levels` takes rows for channels
        144,
        tiles=True,
    ),
    "smp Segformer, PVT v2, thin": shared(
        SMP,
        "Segformer('tu-pvt_v2_b0', encoder_weights=None, classes=2, drop_path_rate=0.0, depths=(1, 1, 1, 1), "
        "embed_dims=(8, 8, 16, 16), num_heads=(1, 2, 2, 2), decoder_segmentation_channels=8)",
        96,
        128,
    ),
    "smp Segformer, MiT-B0": shared(SMP, "Segformer('mit_b0', encoder_weights=None, classes=2)", 128, 192, maps=True),
    "smp DeepLabV3+, ResNet-18": shared(
        SMP, "DeepLabV3Plus('tu-resnet18', encoder_weights=None, classes=2)", 128, 192, maps=True
    ),
    "timm EdgeNeXt-XXS": shared("timm", "Levels(create_model('edgenext_xx_small', features_only=True))", 128, 192),
    "timm XCiT-N, 3 blocks": shared("timm", XCIT, 64, 128),
    "smp Unet, Swin-T, windows of 2": shared(SMP, f"Unet({_SWIN_T}, {_THIN}, window_size=2, {_THREE})", 192, 128),
    "smp UPerNet, Swin": shared(SMP, f"UPerNet({_SWIN_T}, {_THIN}, decoder_channels=32)", 448, 448, maps=True),
    "MONAI SwinUNETR": shared(MONAI, "SwinUNETR(3, 2, feature_size=12, spatial_dims=2, window_size=4)", 256, 256),
    "transformers SegFormer-B0": shared(HF, f"Scores(hf.SegformerForSemanticSegmentation({_SEGFORMER})))", 128, 192),
    "transformers UperNet, Swin v2, windows of 2": shared(
        HF,
        f"{_UPER}, backbone_config=hf.Swinv2Config(embed_dim=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8],"
        f" window_size=2, drop_path_rate=0.0, {_STAGES}))))",
        192,
        128,
        maps=True,
    ),
    "smp FPN, Swin-T, windows of 2": shared(
        SMP, f"FPN({_SWIN_T}, {_ANY}, window_size=2, decoder_dropout=0.0)", 192, 128
    ),
    "smp UPerNet, Swin-T, windows of 2": shared(SMP, f"UPerNet({_SWIN_T}, {_ANY}, window_size=2)", 192, 128, maps=True),
    "smp Unet, Swin v2, windows of 2": shared(SMP, f"Unet({_SWIN2_T}, {_THIN}, window_size=2, {_THREE})", 192, 128),
    "smp Unet, PVT v2": shared(
        SMP, f"Unet('tu-pvt_v2_b0', encoder_weights=None, classes=2, drop_path_rate=0.0, {_THREE})", 128, 192
    ),
    "transformers UperNet, Swin, windows of 2": shared(
        HF,
        f"{_UPER}, backbone_config=hf.SwinConfig(embed_dim=24, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8],"
        f" window_size=2, drop_path_rate=0.0, {_STAGES}))))",
        192,
        128,
        maps=True,
    ),
    "MONAI SwinUNETR, v2, windows of 2": shared(
        MONAI, "SwinUNETR(3, 2, feature_size=12, spatial_dims=2, window_size=2, use_v2=True)", 192, 128
    ),
}
