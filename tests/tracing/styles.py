"""Parts of networks in the styles in which people publish them, in words of our own."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class ChannelNorm(nn.Module):
    """Layer norm over channels, written out, as ConvNeXt's and SAM's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.rand(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Pyramid(nn.Module):
    """Dilated convolutions beside the image's mean, brought back to the size of the features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(channels, 4, 3, padding=rate, dilation=rate) for rate in (1, 2, 3))
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1, bias=False), nn.ReLU())
        self.join = nn.Sequential(nn.Conv2d(16, channels, 1), nn.ReLU(), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [branch(x) for branch in self.branches]
        pooled = functional.interpolate(self.mean(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.join(torch.cat([*found, pooled], dim=1))


class Unpooling(nn.Module):
    """A bottleneck that pools by maxima, pads its channels, and puts values back where they were."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.asymmetric = nn.Sequential(
            nn.Conv2d(channels, channels, (5, 1), padding=(2, 0), bias=False),
            nn.Conv2d(channels, channels, (1, 5), padding=(0, 2)),
            nn.PReLU(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, indices = self.pool(x)
        return self.unpool(self.asymmetric(y), indices)


class Standardized(nn.Conv2d):
    """A convolution whose weights have no mean and a deviation of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.weight.mean(dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (self.weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class Weighted(nn.Module):
    """Sums by learned weights that are positive and add up to one, inputs scaled by buffers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(1, channels, 1, 1))
        self.register_buffer("deviation", torch.rand(channels, 1, 1) + 0.5)
        self.shares = nn.Parameter(torch.rand(2))
        self.one, self.other = Standardized(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - self.mean) / self.deviation
        shares = functional.relu(self.shares)
        shares = shares / (shares.sum() + 1e-4)
        y = shares[0] * self.one(x) + shares[1] * self.other(x)
        return functional.normalize(y, dim=1) + y.clamp(min=0).sqrt().detach()


class Shuffled(nn.Module):
    """Groups of channels that change places, and pixels made of channels by views."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, 4 * channels, 1, groups=2)
        self.unit = nn.ModuleList([nn.ChannelShuffle(4), nn.PixelShuffle(2), nn.Softmax2d(), nn.GLU(dim=1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.unit[0](self.wide(x))
        batch, channels, height, width = y.shape
        z = y.view(batch, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
        z = z.reshape(batch, channels // 4, 2 * height, 2 * width)
        z = self.unit[2](z) + self.unit[1](y)
        one, other = torch.split(self.unit[3](torch.cat([z, z.flip(1)], dim=1)), [2, z.shape[1] - 2], dim=1)
        return functional.avg_pool2d(torch.cat([other, one], dim=1), 3, 2, 1, count_include_pad=False)


class Mirrored(nn.Module):
    """Padded with what lies beside the image's ends, by convolutions and by hand, on the way down too."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.around = nn.Conv2d(channels, channels, (3, 5), padding="same", padding_mode="reflect")
        self.down = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(channels, channels, 3, stride=2), nn.ReLU())
        self.back = nn.Conv2d(channels, channels, 3, padding=(2, 1), padding_mode="replicate", bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.back(self.down(self.around(x)))[:, :, 1:-1]
        y = functional.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=True)
        return x + functional.pad(y, (3, 0, 0, 2), mode="replicate")[:, :, 2:, :-3]


class Parsing(nn.Module):
    """Means over grids of parts of the image, of which 1 x 1 convolutions and norms make features, beside these."""

    def __init__(self, channels: int, norm: type[nn.Module] | None = None, aligned: bool = True) -> None:
        super().__init__()
        self.aligned = aligned
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.AdaptiveAvgPool2d(bins),
                nn.Conv2d(channels, 4, 1, bias=False),
                nn.GroupNorm(2, 4) if norm is None else norm(4),
                nn.ReLU(inplace=True),
            )
            for bins in (1, 2, (3, 5))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.size()[2:]
        found = [functional.interpolate(b(x), size, mode="bilinear", align_corners=self.aligned) for b in self.branches]
        return torch.cat([x, *found], dim=1)


class Attending(nn.Module):
    """Gates of channels by the mean and maximum of the image, of pixels by those of the channels; and the share that a
    channel has in all, by its length over the image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Flatten(), nn.Linear(channels, 3), nn.ReLU(), nn.Linear(3, channels))
        self.along = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.mix = nn.Parameter(torch.rand(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = functional.max_pool2d(x, (x.size(2), x.size(3)), stride=(x.size(2), x.size(3)))
        gate = self.shared(functional.adaptive_avg_pool2d(x, 1)) + self.shared(most)
        x = x * torch.sigmoid(gate).unsqueeze(2).unsqueeze(3).expand_as(x)
        both = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        x = x * torch.sigmoid(both.sum(1, keepdim=True))
        line = self.along(functional.adaptive_max_pool2d(x, 1).squeeze(-1).transpose(-1, -2))
        x = torch.matmul(self.mix, (x * line.transpose(-1, -2).unsqueeze(-1)).flatten(2)).view_as(x)
        length = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        return x * length / (length.mean(1, keepdim=True) + 1e-6) + x.amax((2, 3), keepdim=True)


class Spacious(nn.Module):
    """Pixels that become channels, padded by tensors of zeros, and back; bicubic resizing."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fine = nn.Conv2d(4 * channels + 2, 4 * channels, 3, padding=1)
        self.back = nn.ConvTranspose2d(channels, channels, 3, 2, 1, 1, groups=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.pixel_unshuffle(x, 2)
        batch, _, height, width = y.shape
        y = functional.pixel_shuffle(self.fine(torch.cat([y, torch.zeros(batch, 2, height, width)], dim=1)), 2)
        z = self.back(functional.avg_pool2d(x, 2))
        z = z * (z > 0).to(z.dtype) * 0.3 + (~(z > 1)).type_as(z) * 0.1
        return y + z + functional.interpolate(functional.avg_pool2d(x, 4), scale_factor=4, mode="bicubic")


class NormAct(nn.BatchNorm2d):
    """Batch norm with its activation in one module, as timm's: it counts by itself and calls the function."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        weights = self.running_mean, self.running_var, self.weight, self.bias
        return functional.relu(functional.batch_norm(input, *weights, self.training, self.momentum or 0.0, self.eps))


class Functions(nn.Module):
    """Layers called as functions, by tensors of its own: as they are, laid out anew, scaled, or not moved in training;
    and a tensor joined with one of no channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = NormAct(channels)
        self.kernel = nn.Parameter(torch.randn(3, 3, channels, channels) / 9)
        self.scale = nn.Parameter(torch.rand(1, channels) + 0.5)
        self.register_buffer("mean", torch.randn(channels))
        self.register_buffer("variance", torch.rand(channels) + 0.5)
        self.register_buffer("blur", torch.rand(channels, 1, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale.reshape(-1)
        y = functional.conv2d(self.norm(x), self.kernel.permute(3, 2, 0, 1).flip(-1, -2), scale.view(-1), padding=1)
        y = functional.batch_norm(y, self.mean, self.variance, weight=1 + scale)
        y = functional.group_norm(y, 2, scale * 2, None)
        y = functional.conv_transpose2d(y, self.blur * scale.view(-1, 1, 1, 1), stride=2, groups=y.shape[1])
        empty = torch.empty([y.shape[0], 0, *y.shape[2:]], dtype=y.dtype)
        y = torch.cat([y.new_empty(y.shape[0], 0, *y.shape[2:]), y], dim=1)
        return x + functional.avg_pool2d(torch.cat([y, empty], dim=1), 2)


class OverImage(nn.Module):
    """Attention over the image three ways: by products with fewer keys, as SegFormer's; by torch's one function, as
    timm's; with pixels last, as DANet's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(channels, channels), nn.Linear(channels, 2 * channels)
        self.reduced, self.norm = nn.Conv2d(channels, channels, 2, 2), nn.LayerNorm(channels)
        self.three, self.drop = nn.Linear(channels, 3 * channels), nn.Dropout(0.0)
        self.of_image, self.value = nn.Conv2d(channels, 4, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine, x = x, functional.avg_pool2d(x, 4)
        batch, channels, height, width = x.shape
        tokens = self.norm(x.flatten(2).transpose(1, 2))
        query = self.query(tokens).reshape(batch, height * width, 2, channels // 2).permute(0, 2, 1, 3)
        fewer = self.reduced(tokens.transpose(1, 2).reshape(x.shape)).reshape(batch, channels, -1).permute(0, 2, 1)
        key, value = self.pair(fewer).reshape(batch, -1, 2, 2, channels // 2).permute(2, 0, 3, 1, 4)
        weights = self.drop((query @ key.transpose(-2, -1) * 0.5).softmax(dim=-1))
        tokens = tokens + (weights @ value).transpose(1, 2).reshape(batch, height * width, channels)
        heads = self.three(tokens).reshape(batch, -1, 3, 2, channels // 2).permute(2, 0, 3, 1, 4).unbind(0)
        found = functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(tokens.shape)
        y = (tokens + found).permute(0, 2, 1).view(x.shape)
        query, key = (self.of_image(y).view(batch, 4, -1) for _ in range(2))
        weights = functional.softmax(torch.bmm(query.permute(0, 2, 1), key) / 3, dim=-1)
        z = torch.bmm(self.value(y).view(batch, channels, -1), weights.permute(0, 2, 1)).view(x.shape)
        return fine + functional.interpolate(y + z, scale_factor=4)


class OfProducts(nn.Module):
    """Attention over the image by torch's module, of its pixels and of fewer; between channels, as EdgeNeXt's; linear,
    as EfficientViT's."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.own, self.across = (nn.MultiheadAttention(channels, 2, batch_first=first) for first in (True, False))
        self.reduced, self.linear = nn.Conv2d(channels, channels, 2, 2), nn.Conv2d(channels, 3 * channels, 1)
        self.three, self.heat = nn.Linear(channels, 3 * channels), nn.Parameter(torch.rand(2, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine, x = x, functional.avg_pool2d(x, 4)
        batch, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.own(tokens, tokens, tokens)[0]
        few = self.reduced(x).flatten(2).permute(2, 0, 1)
        tokens = tokens + self.across(tokens.transpose(0, 1), few, few, need_weights=False)[0].transpose(0, 1)
        q, k, v = self.three(tokens).reshape(batch, -1, 3, 2, channels // 2).permute(2, 0, 3, 4, 1).unbind(0)
        weights = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
        found = (weights * self.heat).softmax(dim=-1) @ v
        y = (tokens + found.permute(0, 3, 1, 2).reshape(tokens.shape)).transpose(1, 2).reshape(x.shape)
        lines = self.linear(y).reshape(batch, 2, -1, height * width).transpose(-1, -2)
        q, k, v = lines.chunk(3, dim=-1)
        found = q.relu() @ (k.relu().transpose(-1, -2) @ functional.pad(v, (0, 1), value=1.0))
        found = found[..., :-1] / (found[..., -1:] + 1e-3)
        return fine + functional.interpolate(y + found.transpose(-1, -2).reshape(x.shape), scale_factor=4)


class Placed(nn.Module):
    """Positions computed from the image's size: coordinates beside channels (CoordConv), and codes of sines of places,
    as EdgeNeXt and XCiT add them, which weights map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.coordinates = nn.Conv2d(channels + 2, channels, 3, padding=1)
        self.codes, self.last = nn.Conv2d(8, channels, 1), nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        rows, cols = (torch.arange(side, dtype=x.dtype) / (side - 1) * 2 - 1 for side in (height, width))
        grid = torch.stack(torch.meshgrid(rows, cols, indexing="ij")).expand(batch, 2, height, width)
        y = self.coordinates(torch.cat([x, grid], 1)).relu()
        place = torch.ones(batch, height // 2, width // 2).cumsum(1, dtype=torch.float32)
        place = place / (place[:, -1:, :] + 1e-6) * 6.28
        beside = torch.arange(1, width // 2 + 1).float().repeat(batch, height // 2, 1)
        waves = 100 ** (2 * torch.div(torch.arange(4).float(), 2, rounding_mode="floor") / 4)
        parts = [each[..., None] / waves for each in (place, beside)]
        codes = [torch.stack((p[..., 0::2].sin(), p[..., 1::2].cos()), 4).flatten(3) for p in parts]
        code = self.codes(torch.cat(codes, 3).permute(0, 3, 1, 2).to(x.dtype))
        small = functional.avg_pool2d(y, 2)
        tokens = small.flatten(2).transpose(1, 2) + code.reshape(batch, x.shape[1], -1).permute(0, 2, 1)
        return x + functional.interpolate(self.last(tokens.transpose(1, 2).reshape(small.shape)), scale_factor=2)


class Rotary(nn.Module):
    """Attention over the image whose queries and keys turn by their rows and columns (Su et al., 2021), in heads."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.three = nn.Linear(channels, 3 * channels)
        self.register_buffer("waves", 1 / 10 ** torch.arange(channels // 8).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fine, x = x, functional.avg_pool2d(x, 4)
        batch, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.three(tokens).reshape(batch, -1, 3, 2, channels // 2).permute(2, 0, 3, 1, 4).unbind(0)
        rows = torch.arange(height, dtype=x.dtype).repeat_interleave(width)
        cols = torch.arange(width, dtype=x.dtype).repeat(height)
        angles = torch.cat([rows[:, None] * self.waves, cols[:, None] * self.waves], -1)
        cos, sin = (each.repeat(1, 2)[None, None] for each in (angles.cos(), angles.sin()))
        q, k = (each * cos + self._turned(each) * sin for each in (q, k))
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, channels)
        return fine + functional.interpolate(y.transpose(1, 2).reshape(x.shape), scale_factor=4)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat((-other, one), -1)


STYLES = {
    style.__name__: style
    for style in (
        *(ChannelNorm, Pyramid, Unpooling, Weighted, Shuffled, Mirrored),
        *(Parsing, Attending, Spacious, Functions, OverImage, OfProducts, Placed, Rotary),
    )
}
