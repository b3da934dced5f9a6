"""Networks as their authors write them; modules that do something that no trace has seen, at other sizes, on other
pixels, in training, once they change; and functions that build no network that can be trained here."""

from itertools import count
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

KEYS = count()


class Does:
    """What sly modules do besides, by their keys: an object that no picture of a module's state reaches."""

    by_key: ClassVar[dict[int, str]] = {}


DOES = Does()


class Block(nn.Module):
    """Two convolutions and what they are added to."""

    def __init__(self, channels: int, out: int, norm: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm2d(out) if norm else nn.Identity()
        self.second = nn.Conv2d(out, out, 3, padding=1)
        self.short = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return functional.relu(self.second(y) + self.short(x))


class Somebody(nn.Module):
    """A residual network of two poolings and one skip, with weights of its own, used and unused."""

    def __init__(self, bands: int = 2, classes: int = 3, width: int = 4, norm: bool = False) -> None:
        super().__init__()
        self.stem = Block(bands, width, norm)
        self.down = Block(width, 2 * width, norm)
        self.bottom = Block(2 * width, 2 * width, norm)
        self.head = nn.Conv2d(3 * width, classes, 1)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, classes).view(classes, 1, 1))
        self.register_buffer("shift", torch.linspace(-1, 1, classes).view(classes, 1, 1))
        self.spare = nn.Linear(2, 2)  # which nobody calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine = self.stem(x)
        coarse = self.down(functional.max_pool2d(fine, 2))
        deep = self.bottom(functional.max_pool2d(coarse, 2))
        deep = functional.interpolate(deep, scale_factor=2, mode="nearest") + coarse
        fine = torch.cat([fine, functional.interpolate(deep, scale_factor=2, mode="nearest")], dim=1)
        return self.head(fine) * self.scale + self.shift


class Telling(Somebody):
    """Scores by a name, and scores again with a number, as some authors return theirs."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return {"out": scores, "aux": [torch.sigmoid(scores), 3]}


def build(bands: int, classes: int, width: int = 4, norm: bool = False) -> nn.Module:
    """What `model.build` names."""
    return Somebody(bands, classes, width, norm)


def build_measured(bands: int, classes: int, width: int = 4) -> nn.Module:
    """With norms that come with statistics, as weights trained elsewhere do."""
    module = Somebody(bands, classes, width, norm=True)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2.0)
    return module


def build_aligned(bands: int, classes: int) -> nn.Module:
    """A layer of it has to know its place in the image: corners are aligned."""
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(bands, 4, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.Conv2d(4, classes, 3, padding=1),
    )


class Sly(nn.Module):
    """A small network; `sly` names what it does besides. Set after tracing, no trace can have seen it."""

    def __init__(self, bands: int = 2, classes: int = 3, sly: str = "", norm: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(bands, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, affine=True) if norm else nn.Identity()
        self.drop = nn.Dropout(0.25)
        self.head = nn.Conv2d(4, classes, 1)
        self.register_buffer("count", torch.zeros(()))
        self.key = next(KEYS)
        self.sly = sly

    @property
    def sly(self) -> str:
        """What it does besides: kept where no trace looks."""
        return DOES.by_key[self.key]

    @sly.setter
    def sly(self, sly: str) -> None:
        DOES.by_key[self.key] = sly

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sly == "pixels":
            x = x.clamp(max=3.5)
        if self.sly == "view":
            x = x.clone()
            x[:, :1].clamp_(-3.5, 3.5)
        if self.sly == "bright":
            x = x.clamp(max=50)
        if self.sly == "size" and x.shape[2] == 320:
            x = x * 1.001
        y = functional.relu(self.stem(x))
        if self.sly == "hidden":
            with torch._C.DisableTorchFunction():
                y.clamp_(max=1.5)
        if self.sly == "training" and self.training:
            y = y * 1.0001
        if self.sly == "term":
            y = y + 1e-3 * x.mean(1, keepdim=True)
        if self.sly == "counts":
            self.count += 1
        y = self.drop(self.norm(y))
        return self.head(_Scaled.apply(y) if self.sly == "backward" else y)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 1.01


class LargeOnly(Sly):
    """Other numbers at a size that no trace tries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 2 if x.shape[2] == 352 else x)


class SmallOnly(Sly):
    """Other numbers in training, on up to four small images, of which a trace tries none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1.001 if self.training and len(x) < 5 and x.shape[2] < 60 else x)


def in_training(bands: int, classes: int) -> nn.Module:
    return SmallOnly(bands, classes, norm=False)


def text(bands: int, classes: int) -> str:
    return "a network"


def kind(bands: int, classes: int) -> type[nn.Module]:
    return Somebody


def raising(bands: int, classes: int) -> nn.Module:
    raise ValueError("no such luck\nat all")


def four(bands: int, classes: int) -> nn.Module:
    return Somebody(bands, 4)


def of_four(bands: int, classes: int) -> nn.Module:
    """Whatever the bands that are read."""
    return Somebody(4, classes)


def flat(bands: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(bands, classes, 1), nn.Flatten())


class Pair(nn.Module):
    """Scores, and scores again."""

    def __init__(self, bands: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(bands, classes, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x), torch.relu(self.head(x))


def by_rank(bands: int, classes: int) -> nn.Module:
    module = Somebody(bands, classes)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        nn.init.zeros_(module.head.bias)
    return module
