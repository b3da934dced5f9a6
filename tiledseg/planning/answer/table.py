"""The planner's answer as plain text of at most 80 columns: its first lines, then the sections that are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tiledseg.errors import ConfigError
from tiledseg.planning.answer.rebuilding import rebuilding_text
from tiledseg.planning.answer.text import (
    aligned,
    columns,
    count_parts,
    duration,
    figures_basis,
    time_of,
    words,
    wrapped,
    wrapped_lines,
)
from tiledseg.planning.run.question import RunQuestion
from tiledseg.planning.walk.mode_cost import mode_words
from tiledseg.system.console import counted
from tiledseg.units import size

Part = dict[str, Any]
MOST_HEADING = 4  # lines of the raster and the network
_PRECISIONS = {"fp32": "fp32 without TF32 (train's default)", "fp64": "fp64"}
_PRECISIONS |= {name: f"{name} activations; weights and AdamW in fp32" for name in ("bf16", "fp16")}
PROPOSED = " (as many as the GPUs take; --images-per-step sets it)"
JOB = (
    "--emit slurm or lsf prints its script, whose head has a rehearsal; then compare memory_bytes and seconds in "
    "metrics.jsonl"
)
_LABEL = 11  # columns of the name of a first line
_TITLES = {
    "network": "on the largest context",
    "memory": "a training step on one tile, in mode read",
    "modes": "",
    "stages": "",
    "windows": "drawn anywhere, one at a time",
    "rebuilding": "",
    "cluster": "one tile a GPU",
    "exact": "what changes nothing",
    "paper": "the formula, unpadded convolutions",
}
_ROWS = {  # key, label, format (B: bytes, #: a count with a prefix), remark
    "paper": [
        ("shrink", "d, taken off by a convolution", "", "px"),
        ("halo", "halo epsilon", "", "px"),
        ("tile", "tile T'", "", "px"),
        ("context", "context T = T' + 2 epsilon", "", "px"),
        ("efficiency", "efficiency E = T^2 / T'^2", ".4f", "ideally 1"),
        ("efficiency_linear", "its linear form", ".4f", ""),
    ],
    "exact": [
        ("alignment", "alignment of core edges", "", "px"),
        ("halo_minimum", "smallest exact halo", "", "px"),
        ("halo", "halo, rounded to legal sizes", "", "px; {border} at the raster's border"),
        ("grid", "grid", "", "rows x columns, {tiles} tiles"),
        ("core_max", "largest core", "", "px"),
        ("core_min", "smallest core", "", "px"),
        ("context_max", "largest context", "", "px"),
        ("efficiency", "efficiency E, whole raster", ".4f", "context pixels / core pixels"),
    ],
    "network": [
        ("layers", "layers", "", ""),
        ("parameters", "parameters", ",", ""),
        ("multiply_adds_context", "multiply-adds, forward", "#", "a context"),
        ("multiply_adds_image", "multiply-adds, forward", "#", "an image, halos included"),
    ],
    "memory": [
        ("weights", "weights", "B", "{precision}, and autocast's copies below fp32"),
        ("gradients", "gradients", "B", "summed in float64"),
        ("optimizer", "optimizer", "B", "AdamW"),
        ("activations", "activations kept", "B", "with the loss"),
        ("backward", "backward pass on top", "B", "at its worst moment"),
        ("total", "in all", "B", "beside the device's context and workspaces"),
        ("gpu", "GPU", "B", "{fit}"),
    ],
    "windows": [
        ("side", "side", "", "px"),
        ("epoch", "windows an epoch", ",", "their pixels, once"),
        ("exact_context", "context, with its halo", "", "px at most"),
        ("exact_efficiency", "efficiency E", ".4f", "context pixels / window pixels"),
        ("exact_bytes", "a training step", "B", ""),
        ("crops_number", "crops of a map", ",", "that share {crops_overlap} of a side"),
        ("crops_computed", "computed", ",", "on a rank a tile: {crops_twice:.1%} more; on one rank none"),
        ("none_context", "context, as an image of its own", "", "px at most"),
        ("none_efficiency", "efficiency E", ".4f", "context pixels / window pixels"),
        ("none_bytes", "a training step", "B", ""),
    ],
    "cluster": [
        ("gpus_per_image", "GPUs an image", "", ""),
        ("nodes_per_image", "nodes an image", ".2f", "of {gpus_per_node} GPUs"),
        ("images", "images", ",", "{tiles:,} tiles in all"),
        ("gpus", "GPUs", ",", ""),
        ("rounds", "rounds an epoch", ",", "a tile a GPU each"),
        ("idle_gpus_last_round", "idle GPUs, last round", ",", ""),
        ("utilisation", "GPUs in use", ".1%", "of an epoch"),
    ],
}
_SUMMED = "parameters", "multiply_adds", "activation_bytes"


def table(question: RunQuestion, answer: Part, show: str | None = None) -> str:
    """Return the first lines of the answer, and the sections `show`. Raises ConfigError for one that it lacks."""
    there = [name for name in _TITLES if answer.get(name) is not None]
    shown = () if show is None else tuple(name.strip() for name in show.split(","))
    missing = next((name for name in shown if name not in (*there, "all")), None)
    if missing is not None:
        raise ConfigError(f"--show names '{missing}', but this plan has {','.join(there)}; give some of them, or all")
    if "summary" in answer:
        blocks = [_summary(question, answer, there)]
    else:
        blocks, shown = ["\n".join(wrapped_lines(heading(question)))], ("all",)
    shown = (*shown, "stages", "windows", "rebuilding")  # only the plans have these that ask for them
    blocks += [_section(name, answer) for name in there if name in shown or "all" in shown]
    return "\n\n".join([*blocks, wrapped(f"left out: {answer['omitted']}", "")] if "omitted" in answer else blocks)


def network_text(question: RunQuestion) -> str:
    """Return bands, classes, and lines of the network and its options, which may be the defaults of `train`."""
    network = question.network
    usual = question.keyed and type(network)().in_words.splitlines()[-1] == network.in_words.splitlines()[-1]
    counts = f"{network.bands} bands, {network.classes} classes"
    return f"{counts}\n{network.in_words}" + " (train's defaults)" * usual


def heading(question: RunQuestion) -> str:
    """Return the raster, and `network_text`."""
    return f"{words(question.shape)} px, {network_text(question)}"


def _summary(question: RunQuestion, answer: Part, sections: Sequence[str]) -> str:
    """Return at most 25 lines."""
    part = answer["summary"]
    lines = [*wrapped_lines(heading(question))[:MOST_HEADING], "", _row("memory", memory_words(part))]
    halo = f"halo {part['halo']} px, contexts of {words(part['context'])} px at most"
    lines.append(_row("precision", precision_words(question.precision, part)))
    lines.append(_row("grid", f"{words(part['grid'])}: {counted(part['tiles'], 'tile')}, {halo}"))
    if part["modes"]:
        first, *others = (
            f"{mode_words(row['mode'], row['fusion'])}{':' * (not at)} {duration(row['milliseconds'] / 1000)}"
            for at, row in enumerate(part["modes"])
        )
        nodes = counted(math.ceil(part["gpus"] / part["gpus_per_node"]), "node")
        kind, number = ("tile", "micro_batches") if "stages" in answer else ("image", "images_per_step")
        items = counted(part[number], kind) + PROPOSED * (kind == "image" and part["proposed"])
        epoch = f"{duration(part['epoch_seconds'])} for {counted(part['images'], 'image')}"
        epoch += (f" in {steps_words(part)}" if kind == "image" and part["images"] > 1 else "") + beside(part)
        lines += [
            _row("halo mode", f"{first} a step{', against ' * bool(others)}{', '.join(others)}"),
            _row("GPUs", f"{part['gpus']:,} at work, on {nodes} of {part['gpus_per_node']}{idle_words(part)}"),
            _row("step", f"{duration(part['milliseconds'] / 1000)} for {items}, predicted: {part['machine']}"),
            _row("epoch", epoch),
        ]
    for place, other in enumerate(part["better"]):
        figures = f"{mode_words(other['mode'], other['fusion'])}, epoch {duration(other['epoch_seconds'])}"
        text = f"{other['flags']}: {figures}, {size(other['memory'])}, {other['gpus']:,} GPUs"
        lines.append(_row("" if place else "better", text))
    return "\n".join([*lines, _row("job", JOB), _row("more", f"--show {','.join(sections)} or all; --help")])


def precision_words(precision: str, part: Part) -> str:
    """Return the values of a run, and whether the machine has no faster rate for narrow ones."""
    return _PRECISIONS[precision] + f"; {part['slow_precision']}" * bool(part["slow_precision"])


def steps_words(part: Part) -> str:
    """Return how many steps an epoch has."""
    return counted(-(-part["images"] // part["images_per_step"]), "step")


def beside(part: Part) -> str:
    """Return the rate at which files must come, where the predicted seconds of an epoch leave out reading."""
    rate = part["epoch_values"] / max(part["epoch_seconds"], 1e-6)
    one, two = (f"{' '.join(count_parts(round(width * rate)))}B/s of uint{8 * width}" for width in (1, 2))
    return "" if part["reading"] else f", if all GPUs together read {one}, {two}"


def idle_words(part: Part) -> str:
    """Return how many GPUs have nothing to do, and fewer that do as much on fewer nodes; empty where all have work."""
    idle = part["gpus_asked"] - part["gpus"]
    asked, busy = (-(-part[number] // part["gpus_per_node"]) for number in ("gpus_asked", "gpus"))
    advice = f": --gpus {part['gpus']} does as much" if busy < asked else ""
    return f"; {idle:,} idle{advice}" if idle > 0 else ""


def memory_words(part: Part) -> str:
    """Return the bytes of a GPU besides those of its context and libraries, and whether they fit by recomputing."""
    if "reason" in part:
        return f"no mode can be: {part['reason']}"
    left_out, fits = "without CUDA's own", "fits" if part["fits"] else "does NOT fit"
    if part["fits"] is None:
        return f"{size(part['memory'])} a GPU, {left_out}; --machine or --gpu-memory says whether that fits"
    again = f", recomputing {counted(part['recomputed'], 'tensor')}: {part['recompute_percent']:.0f} % more time"
    of_gpu = f"{size(part['memory'])} of {size(part['gpu'])} a GPU, {left_out}"
    return f"{of_gpu}: {fits}{again if part['recomputed'] else ''}"


def _section(name: str, answer: Part) -> str:
    part, title, mode = answer[name], _TITLES[name], answer.get("summary", {}).get("mode", "read")
    if name in ("modes", "stages"):
        return _modes(part) if name == "modes" else _stages(part)
    if name == "rebuilding":
        title = f"rebuilding: a training step on {words(part['context'])} px in {size(part['budget'])}"
        return f"{title}\n{rebuilding_text(part)}"
    nested = [(key, value) for key, value in part.items() if isinstance(value, dict)]
    flat = part | {f"{key}_{inner}": value for key, values in nested for inner, value in values.items()}
    flat["fit"] = "fits" if part.get("fits") else f"does NOT fit: {part.get('remedy')}"
    rows = []
    for key, label, kind, remark in (row for row in _ROWS[name] if row[0] in flat):
        value, unit = flat[key], remark.format(**flat)
        if kind in ("B", "#"):
            number, prefix = size(value).split() if kind == "B" else count_parts(value)
            rows.append((label, number, f"{prefix} {unit}".strip()))
        else:
            rows.append((label, format(value, kind) if kind else words(value), unit))
    if name == "memory" and mode != "read":
        title += f" ({mode}, above: {size(answer['summary']['memory'])})"
    text = f"{name}: {title}\n{aligned(rows)}"
    return f"{text}\n\n{_layers(part)}" if name == "network" else text


def _row(label: str, text: str) -> str:
    return wrapped(text, label.ljust(_LABEL), " " * _LABEL)


def _layers(part: Part) -> str:
    rows = [("stage", "output", "parameters", "multiply-adds", "activations kept")]
    stages: dict[str, dict[str, Any]] = {}  # layers of one level and side: the word before the dot of their names
    for layer in part["by_layer"]:
        name = layer["name"].split(".")[0]
        stage = stages.setdefault(name, {"name": name} | dict.fromkeys(_SUMMED, 0))
        stage |= {key: stage[key] + layer[key] for key in _SUMMED} | {"shape": layer["shape"]}
    for stage in stages.values():
        work = " ".join(count_parts(stage["multiply_adds"])).strip()
        rows.append(
            (stage["name"], words(stage["shape"]), f"{stage['parameters']:,}", work, size(stage["activation_bytes"]))
        )
    return columns(rows)


def _modes(part: Part) -> str:
    """Return a title, a row a mode, the basis of the seconds, the all-reduce of all modes, and the choice."""
    choice, machine, reduce = part["choice"], part["machine"], part["gradient_all_reduce"]
    possible = [row for row in part["costs"] if row["possible"]]
    remarks = [f"{row['mode']}: not possible: {row['reason']}" for row in part["costs"] if not row["possible"]]
    remarks.append(
        f"in all modes: one all-reduce of gradients, {size(reduce['bytes'])}, {reduce['milliseconds']:.4g} ms of the "
        "time predicted"
    )
    basis = figures_basis(machine) if "profile" in machine else "assumed, not measured"
    remarks.append(
        f"{basis}: {machine['flops'] / 1e12:.4g} Tflop/s a rank, {machine['bandwidth'] / 1e9:.4g} GB/s between ranks, "
        f"{machine['latency'] * 1e6:.4g} us a message"
    )
    rows = [("mode", "E", "reads", "messages", "sent", "memory", "predicted", "")]
    for row in possible:
        chosen = (row["mode"], row["fusion"]) == (choice["mode"], choice["fusion"])
        faults = "chosen" * chosen, "not exact" * (not row["exact"]), "does NOT fit" * (not row.get("fits", True))
        rows.append(
            (
                row["mode"] + f" ({row['fusion']})" * (row["fusion"] not in (None, 1)),
                f"{row['efficiency']:.4f}",
                f"{row['pixels_read_rank'] / 1e6:.4g} Mpx",
                f"{row['messages_rank']:,}",
                size(row["bytes_rank"]),
                size(row["memory_rank"]),
                time_of(row["milliseconds"]),
                ", ".join(filter(None, faults)),
            )
        )
    images, gpus = counted(part["images_per_step"], "image"), counted(part["gpus"], "rank")
    title = f"modes: a training step of {images} on {gpus}, by the busiest rank"
    return "\n".join([wrapped(title, ""), columns(rows), *map(wrapped, [*remarks, f"choice: {choice['reason']}"])])


def _stages(part: Part) -> str:
    """Return a title, a row a stage, the balance, the parts of the time, and the schedule drawn."""
    modes, step = part["recompute"], part["step"]
    again = modes[0] if len(set(modes)) == 1 else f"[{','.join(modes)}]"
    parts = ("work", "imbalance", *(["recompute"] if step["recompute_milliseconds"] else []), "bubble", "transfer")
    shown = " + ".join(f"{name}{'s' * (name == 'transfer')} {step[f'{name}_milliseconds']:.4g}" for name in parts)
    second = "; f, b: the stage's second chunk" * (len(part["balance"]) > part["stages"])
    rows = [("#", "layers", "work", "time", "held", "memory", "sent on", "skips", "")]
    for row in part["by_stage"]:
        rows.append(
            (
                str(row["stage"]),
                ", ".join(f"{first}-{stop - 1}" for first, stop in row["layers"]),
                f"{100 * row['share']:.1f} %",
                time_of(row["milliseconds"]),
                ", ".join(map(str, row["in_flight"])),
                size(row["memory"]["total"]),
                size(row["activation_bytes"]),
                size(row["skip_bytes"]),
                "" if row.get("fits", True) else "does NOT fit",
            )
        )
    title = (
        f"stages: a step of {part['micro_batches']} micro-batches of {words(part['context'])} px, {part['stages']} "
        f"stages, schedule {part['schedule']}{'' if again == 'never' else f', recompute {again}'}"
    )
    lines = [
        f"balance, {'automatic' if part['automatic'] else 'given'}: [{','.join(map(str, part['balance']))}]",
        f"the slowest stage has {100 / part['cap']:.1f} % of the work, so the cap is {part['cap']:.2f} x",
        f"step {step['milliseconds']:.4g} ms = {shown}",
        f"predicted speed-up {step['speed_up']:.2f} x over one GPU, {100 * step['busy_share']:.1f} % busy, "
        f"{size(part['bytes_step'])} sent a step",
        f"drawn for equal stages: F forward, B backward (two slots), . waiting{second}",
    ]
    return "\n".join([wrapped(title, ""), columns(rows), *map(wrapped, lines), *(f"  {x}" for x in part["drawing"])])
