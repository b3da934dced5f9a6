"""What makes the recipes of `jobs/recipes` fit a small machine: flags after the file. All else is the recipe's."""

from __future__ import annotations

SMALL: dict[str, tuple[str, ...]] = {
    "camvid-segnet": ("--model.base_channels", "8"),
    "cityscapes-gated-scnn": ("--model.base_channels", "8", "--train.window", "64"),
    # the rate of the paper's one worker, 0.00125, for 9 images in place of 250
    "transfer-learning": ("--model.base_channels", "8", "--train.images_per_step", "9", "--optimizer.lr", "0.00013889"),
}
