"""The keys of the configuration that a resumed run may not change, or not everywhere; docs/resume.md says why.

Every other key may change from the checkpoint on: it changes speed and memory alone, or a change of the result is said.
"""

from __future__ import annotations

REFUSED = frozenset(
    f"{group}.{key}"
    for group, keys in {
        "data": (
            *("classes", "label_layer", "label_attribute", "background", "warp_images", "area", "split"),
            *("split_share", "split_gap", "split_seed", "ignore_index", "nodata", "bands", "normalize"),
        ),
        "model": (
            *("name", "levels", "convs_per_level", "kernel", "base_channels", "padding", "norm", "upsampling"),
            *("dropout", "encoder", "pretrained", "image_mean", "edge_band", "build", "arguments"),
        ),
        "optimizer": ("name",),
    }.items()
    for key in keys
)
EDGE = {
    "data.images": "sources",
    "data.labels": "sources",
    "tiling.grid": "grids",
    "train.tiles_per_step": "tiles_per_step",
    "train.images_per_step": "images_per_step",
    "train.seed": "seed",
    "train.sampling": "windows",
    "train.window": "windows",
    "train.windows_per_step": "windows",
    "train.window_halo": "windows",
    "train.skip_empty": "content",
    "train.balance_classes": "content",
}
"""Keys that may change between epochs and their names in `sampling_fingerprint`: they order the steps."""
NAMES = frozenset({"train.resume", "run.output", "run.verbosity", "run.panels"})
"""Keys that name the run, or change its words and pictures: they are not compared."""


def rule_of(key: str) -> str:
    """Return the rule of a key as docs/resume.md names it."""
    if key in REFUSED:
        return "refused"
    return "between epochs" if key in EDGE else "names the run" if key in NAMES else "may change"
