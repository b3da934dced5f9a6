"""Stand-ins for published files: torchvision's names, written down a second time, with seeded values."""

from collections.abc import Iterator

import torch

Tensors = dict[str, torch.Tensor]
VGG = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # channels; 0: a pooling


def vgg(normed: bool, thinner: int = 1) -> Tensors:
    """VGG-16, with norms or without, with so many times fewer channels."""
    shapes: dict[str, tuple[int, ...]] = {}
    number, before = 0, 3
    for width in VGG:
        if width:
            channels = width // thinner
            shapes[f"features.{number}"] = (channels, before, 3, 3)
            number, before = number + 1, channels
            if normed:
                shapes[f"features.{number}"] = (channels,)
                number += 1
        number += 1
    shapes["classifier.0"] = (8, before)
    return _drawn(shapes, biased=True)


def resnet(blocks: tuple[int, ...], bottleneck: bool, width: int = 64) -> Tensors:
    """A ResNet of so many blocks a layer."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (width, 3, 7, 7), "bn1": (width,)}
    before = width
    for layer, count in enumerate(blocks, start=1):
        narrow = width << (layer - 1)
        wide = 4 * narrow if bottleneck else narrow
        for block in range(count):
            name = f"layer{layer}.{block}"
            kernels = [(1, narrow), (3, narrow), (1, wide)] if bottleneck else [(3, narrow), (3, wide)]
            given = before
            for i, (kernel, channels) in enumerate(kernels, start=1):
                shapes |= {f"{name}.conv{i}": (channels, given, kernel, kernel), f"{name}.bn{i}": (channels,)}
                given = channels
            if before != wide or (block == 0 and layer > 1):
                shapes |= {f"{name}.downsample.0": (wide, before, 1, 1), f"{name}.downsample.1": (wide,)}
            before = wide
    return _drawn({**shapes, "fc": (8, before)}, biased=False)


def wide_resnet(thinner: int) -> Tensors:
    """The wide ResNet-38 as G-SCNN's published code names it, so many times thinner."""
    shapes: dict[str, tuple[int, ...]] = {"mod1.conv1": (64 // thinner, 3, 3, 3)}
    before = 64 // thinner
    counts, widths = (3, 3, 6, 3, 1, 1), ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048))
    for number, (count, own) in enumerate(zip(counts, (*widths, (1024, 2048, 4096)), strict=True), start=2):
        channels = [width // thinner for width in own]
        for block in range(1, count + 1):
            name, given = f"mod{number}.block{block}", before
            shapes[f"{name}.bn1.0"] = (before,)
            for i, (width, kernel) in enumerate(zip(channels, (3, 3) if len(own) == 2 else (1, 3, 1), strict=True), 1):
                shapes[f"{name}.convs.conv{i}"] = (width, given, kernel, kernel)
                if i < len(channels):
                    shapes[f"{name}.convs.bn{i + 1}.0"] = (width,)
                given = width
            if before != channels[-1]:
                shapes[f"{name}.proj_conv"] = (channels[-1], before, 1, 1)
            before = channels[-1]
    return _drawn({**shapes, "bn_out.0": (before,), "classifier.fc": (8, before)}, biased=False)


def _drawn(shapes: dict[str, tuple[int, ...]], biased: bool) -> Tensors:
    generator = torch.Generator().manual_seed(8)

    def entries(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
        if len(shape) == 1:
            for leaf in ("weight", "running_var"):
                yield f"{name}.{leaf}", torch.rand(shape, generator=generator) + 0.5
            for leaf in ("bias", "running_mean"):
                yield f"{name}.{leaf}", torch.randn(shape, generator=generator)
            return
        yield f"{name}.weight", torch.randn(shape, generator=generator) * 0.1
        if biased or len(shape) == 2:
            yield f"{name}.bias", torch.randn(shape[0], generator=generator)

    return {key: tensor for name, shape in shapes.items() for key, tensor in entries(name, shape)}
