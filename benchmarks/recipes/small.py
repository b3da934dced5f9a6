"""What makes the recipes of `jobs/recipes` fit a small machine: flags after the file. All else is the recipe's."""

from __future__ import annotations

SMALL: dict[str, tuple[str, ...]] = {
    "camvid-segnet": ("--model.base_channels", "8"),
    "cityscapes-gated-scnn": ("--model.base_channels", "8", "--train.window", "64"),
    # the rate of the paper's one worker, 0.00125, for 9 images in place of 250
    "transfer-learning": ("--model.base_channels", "8", "--train.images_per_step", "9", "--optimizer.lr", "0.00013889"),
}

MAPPED = {
    "camvid-segnet": (
        "data/CamVid/701_StillsRaw_full/Seq05VD_f00000.png",
        "data/CamVid/LabeledApproved_full/Seq05VD_f00000_L.png",
    ),
    "cityscapes-gated-scnn": (
        "data/cityscapes/leftImg8bit/val/munster/munster_000000_000019_leftImg8bit.png",
        "data/cityscapes/gtFine/val/munster/munster_000000_000019_gtFine_labelIds.png",
    ),
    "transfer-learning": ("data/transfer/images/009.png", "data/transfer/labels/009.png"),
}
"""An image that each recipe validates on, and its labels."""
