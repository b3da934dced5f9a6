"""Stand-ins for published files: torchvision's names, written down a second time, with seeded values."""

from __future__ import annotations

from collections.abc import Iterator

import torch

Tensors = dict[str, torch.Tensor]
VGG = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # channels; 0: a pooling


def vgg(normed: bool, thinner: int = 1) -> Tensors:
    """VGG-16, with norms or without, with so many times fewer channels."""
    shapes, number, before = {}, 0, 3
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
