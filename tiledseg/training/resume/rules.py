"""What becomes of each key of the configuration where a run goes on from a checkpoint: one table."""

from __future__ import annotations

from typing import NamedTuple

MAY, EDGE, REFUSED, OTHER = "may change", "between epochs", "refused", "names the run"


class Rule(NamedTuple):
    """`change`: MAY, from the checkpoint on; EDGE, where the checkpoint stands between two epochs; REFUSED; OTHER, not
    compared, since it says which run goes on. `why` is for docs/resume.md."""

    change: str
    why: str


_MEANING = "the weights have learned what it says of the pixels"
_LEARNT = "it says which pixels are learned from, and which are judged by"
_LAW = "it changes speed and memory, never the result"
_SHAPE = "it decides the shapes of the weights, or what they do"
_ORDER = "the order of the steps of an epoch depends on it"
_LOSS = "the loss is another one from then on, as is said"
_RATE = "the rate is a pure function of the step and the position"

RULES: dict[str, Rule] = {
    "data.images": Rule(
        EDGE,
        "images may be added, left out, or moved to another path (known by content; that at any time); those of before "
        "keep their order. The normalisation stays that of the first images",
    ),
    "data.labels": Rule(EDGE, "those of added images; an image of before keeps its labels, wherever they lie"),
    "data.val_images": Rule(
        MAY, "validation trains nothing; scores before and after are of other images, so the best begins anew"
    ),
    "data.val_labels": Rule(MAY, "as val_images"),
    "data.classes": Rule(REFUSED, f"{_MEANING}; other names, colours, or words for the same map are none"),
    "data.label_layer": Rule(REFUSED, _MEANING),
    "data.label_attribute": Rule(REFUSED, _MEANING),
    "data.background": Rule(REFUSED, _MEANING),
    "data.warp": Rule(MAY, "labels that lie on the image's grid are read as they are; others were refused"),
    "data.warp_images": Rule(REFUSED, f"{_MEANING}; on another grid the images are others"),
    "data.area": Rule(REFUSED, _LEARNT),
    "data.split": Rule(REFUSED, _LEARNT),
    "data.split_share": Rule(REFUSED, _LEARNT),
    "data.split_gap": Rule(REFUSED, _LEARNT),
    "data.split_seed": Rule(REFUSED, _LEARNT),
    "data.ignore_index": Rule(REFUSED, _MEANING),
    "data.nodata": Rule(REFUSED, _MEANING),
    "data.bands": Rule(REFUSED, f"{_MEANING}; mean and deviation are in their order"),
    "data.references": Rule(MAY, "it says which files may be opened, not what is in them"),
    "data.normalize": Rule(REFUSED, "mean and deviation are those of the checkpoint"),
    "data.workers": Rule(MAY, _LAW),
    "data.prefetch": Rule(MAY, _LAW),
    "tiling.grid": Rule(EDGE, f"with train.tiles_per_step, since {_ORDER}; without it at any time, since {_LAW}"),
    "tiling.halo": Rule(MAY, _LAW),
    "model.name": Rule(REFUSED, f"{_SHAPE}; another name for the same network is none"),
    "model.levels": Rule(REFUSED, _SHAPE),
    "model.convs_per_level": Rule(REFUSED, _SHAPE),
    "model.kernel": Rule(REFUSED, _SHAPE),
    "model.base_channels": Rule(REFUSED, _SHAPE),
    "model.padding": Rule(REFUSED, _SHAPE),
    "model.norm": Rule(REFUSED, _SHAPE),
    "model.upsampling": Rule(REFUSED, _SHAPE),
    "model.dropout": Rule(REFUSED, "it is part of the network that a checkpoint describes"),
    "model.freeze_norm": Rule(MAY, "the statistics stand still from then on, or move again from where they are"),
    "model.encoder": Rule(REFUSED, _SHAPE),
    "model.pretrained": Rule(REFUSED, "the weights began with it; it is not read again, and may be gone"),
    "model.image_mean": Rule(REFUSED, _SHAPE),
    "model.edge_band": Rule(REFUSED, _SHAPE),
    "model.build": Rule(REFUSED, _SHAPE),
    "model.arguments": Rule(REFUSED, _SHAPE),
    "model.verify": Rule(MAY, "it changes no number"),
    "parallel.exact": Rule(MAY, "what it accepts is said in a warning"),
    "parallel.halo": Rule(MAY, _LAW),
    "parallel.mesh": Rule(MAY, _LAW),
    "parallel.fusion": Rule(MAY, _LAW),
    "parallel.overlap": Rule(MAY, _LAW),
    "parallel.stages": Rule(MAY, _LAW),
    "parallel.balance": Rule(MAY, _LAW),
    "parallel.schedule": Rule(MAY, _LAW),
    "parallel.micro_batches": Rule(MAY, _LAW),
    "parallel.recompute": Rule(MAY, f"{_LAW}; the same by memory.recompute is no change"),
    "parallel.idle_ranks": Rule(MAY, _LAW),
    "parallel.transport": Rule(MAY, _LAW),
    "parallel.deadline": Rule(MAY, "it says when a job that stands still is ended"),
    "parallel.machine": Rule(MAY, "it says what `auto` takes: see `tiling.grid`"),
    "parallel.auto": Rule(MAY, f"{_LAW}; what was found is kept on as many ranks"),
    "memory.budget": Rule(MAY, _LAW),
    "memory.recompute": Rule(MAY, _LAW),
    "memory.offload": Rule(MAY, _LAW),
    "memory.blocks": Rule(MAY, _LAW),
    "memory.store": Rule(MAY, _LAW),
    "optimizer.name": Rule(REFUSED, "what one optimizer has gathered means nothing to another"),
    "optimizer.lr": Rule(MAY, _RATE),
    "optimizer.scale_lr": Rule(MAY, _RATE),
    "optimizer.lr_factors": Rule(
        MAY, "what an optimizer has gathered stays with its weight; of a frozen one (0) it is let go, and starts anew"
    ),
    "optimizer.momentum": Rule(MAY, "from 0 or to 0 its buffers start anew"),
    "optimizer.weight_decay": Rule(MAY, "it has no state"),
    "optimizer.decay_norms": Rule(MAY, "it has no state"),
    "optimizer.policy": Rule(MAY, _RATE),
    "optimizer.warmup_steps": Rule(MAY, f"{_RATE}: with more than are done it rises again"),
    "optimizer.step_size": Rule(MAY, _RATE),
    "optimizer.gamma": Rule(MAY, _RATE),
    "optimizer.power": Rule(MAY, _RATE),
    "optimizer.clip_norm": Rule(MAY, "it has no state"),
    "train.epochs": Rule(
        MAY, "the end moves, and the rate is that of a run of so many; fewer than are done are refused"
    ),
    "train.tiles_per_step": Rule(EDGE, _ORDER),
    "train.images_per_step": Rule(EDGE, _ORDER),
    "train.loss": Rule(MAY, _LOSS),
    "train.focal_gamma": Rule(MAY, _LOSS),
    "train.tversky_alpha": Rule(MAY, _LOSS),
    "train.tversky_beta": Rule(MAY, _LOSS),
    "train.boundary_radius": Rule(MAY, _LOSS),
    "train.label_smoothing": Rule(MAY, _LOSS),
    "train.ema": Rule(
        MAY, "the average goes on; from 0 it begins with the weights of the checkpoint, to 0 it is let go"
    ),
    "train.best": Rule(MAY, "the best of another score begins anew"),
    "train.early_stop": Rule(MAY, "the end may come earlier, at once too, or later"),
    "train.largest_loss": Rule(MAY, "it trains nothing"),
    "train.class_weights": Rule(
        MAY, f"{_LOSS}; weights that were counted stay those of the images that the run began with"
    ),
    "train.tiles_per_batch": Rule(
        MAY, "speed and memory; below fp64 the sum of a batch's gradients is rounded otherwise from then on"
    ),
    "train.compile": Rule(MAY, "speed and memory; sums are rounded otherwise from then on"),
    "train.precision": Rule(
        MAY,
        "weights and the optimizer's state are converted; fp64 to another rounds them, fp16 begins with a new scale",
    ),
    "train.seed": Rule(EDGE, f"{_ORDER}; the weights are drawn no more, dropout follows the new one"),
    "train.checkpoint_every": Rule(MAY, "it trains nothing"),
    "train.keep_checkpoints": Rule(MAY, "it trains nothing"),
    "train.validate_every": Rule(MAY, "it trains nothing"),
    "train.resume": Rule(OTHER, "it names the checkpoint"),
    "train.deterministic": Rule(MAY, "from then on bits are promised, or no more"),
    "train.edge_weight": Rule(MAY, _LOSS),
    "train.edge_balance": Rule(MAY, _LOSS),
    "train.edge_radius": Rule(MAY, _LOSS),
    "train.attention_weight": Rule(MAY, _LOSS),
    "train.dual_weight": Rule(MAY, _LOSS),
    "train.sampling": Rule(EDGE, _ORDER),
    "train.window": Rule(EDGE, _ORDER),
    "train.windows_per_step": Rule(EDGE, _ORDER),
    "train.window_halo": Rule(EDGE, "windows of another kind are another way to train"),
    "train.skip_empty": Rule(EDGE, _ORDER),
    "train.balance_classes": Rule(EDGE, _ORDER),
    "train.augment": Rule(MAY, "the pixels are others from then on, as is said"),
    "train.augment_each": Rule(MAY, "as augment"),
    "run.output": Rule(OTHER, "another folder without checkpoints starts anew; with train.resume it goes on there"),
    "run.verbosity": Rule(OTHER, "it changes what is said"),
    "run.panels": Rule(OTHER, "it changes what is drawn"),
}


def table() -> str:
    """The rules as docs/resume.md has them."""
    rows = [f"| `{key}` | {rule.change} | {rule.why} |" for key, rule in RULES.items()]
    return "\n".join(["| key | another value | why |", "| --- | --- | --- |", *rows])
