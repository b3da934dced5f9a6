"""The planner's answer as aligned plain text: its first lines, then the sections that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiledseg.errors import ConfigError
from tiledseg.planning.answer.modes import modes_text
from tiledseg.planning.answer.rebuilding import rebuilding_table
from tiledseg.planning.answer.report import Answer, by_stage
from tiledseg.planning.answer.stages import stages_text
from tiledseg.planning.answer.summary import summary_text
from tiledseg.planning.answer.text import aligned, columns, count_parts, size, size_parts, words
from tiledseg.planning.question import Question

SECTIONS = "network", "memory", "modes", "stages", "windows", "rebuilding", "cluster", "exact", "paper"
_ROWS = {  # of a title: key, label, format (B: bytes, #: a count with a prefix), remark
    "paper: the formula, unpadded convolutions": [
        ("shrink", "d, taken off by a convolution", "", "px"),
        ("halo", "halo epsilon", "", "px"),
        ("tile", "tile T'", "", "px"),
        ("context", "context T = T' + 2 epsilon", "", "px"),
        ("efficiency", "efficiency E = T^2 / T'^2", ".4f", "ideally 1"),
        ("efficiency_linear", "its linear form", ".4f", ""),
    ],
    "exact: what changes nothing": [
        ("alignment", "alignment of core edges", "", "px"),
        ("halo_minimum", "smallest exact halo", "", "px"),
        ("halo", "halo, rounded to legal sizes", "", "px; {border} at the raster's border"),
        ("grid", "grid", "", "rows x columns, {tiles} tiles"),
        ("core_max", "largest core", "", "px"),
        ("core_min", "smallest core", "", "px"),
        ("context_max", "largest context", "", "px"),
        ("efficiency", "efficiency E, whole raster", ".4f", "context pixels / core pixels"),
    ],
    "network: on the largest context": [
        ("layers", "layers", "", ""),
        ("parameters", "parameters", ",", ""),
        ("multiply_adds_context", "multiply-adds, forward", "#", "a context"),
        ("multiply_adds_image", "multiply-adds, forward", "#", "an image, halos included"),
    ],
    "memory: a training step on one tile": [
        ("weights", "weights", "B", "precision {precision}, with copies of autocast below fp32"),
        ("gradients", "gradients", "B", "summed in float64"),
        ("optimizer", "optimizer", "B", "AdamW"),
        ("activations", "activations kept", "B", "with the loss"),
        ("backward", "backward pass on top", "B", "at its worst moment"),
        ("total", "in all", "B", "without the device's own context and workspaces"),
        ("gpu", "GPU", "B", "{fit}"),
    ],
    "windows: drawn anywhere, one at a time": [
        ("side", "side", "", "px"),
        ("epoch", "windows an epoch", ",", "their pixels, once"),
        ("exact_context", "context, with its halo", "", "px at most"),
        ("exact_efficiency", "efficiency E", ".4f", "context pixels / window pixels"),
        ("exact_bytes", "a training step", "B", ""),
        ("none_context", "context, as an image of its own", "", "px at most"),
        ("none_efficiency", "efficiency E", ".4f", "context pixels / window pixels"),
        ("none_bytes", "a training step", "B", ""),
    ],
    "cluster: one tile a GPU": [
        ("gpus_per_image", "GPUs an image", "", ""),
        ("nodes_per_image", "nodes an image", ".2f", "of {gpus_per_node} GPUs"),
        ("images", "images", ",", "{tiles:,} tiles in all"),
        ("gpus", "GPUs", ",", ""),
        ("rounds", "rounds an epoch", ",", "a tile a GPU each"),
        ("idle_gpus_last_round", "idle GPUs, last round", ",", ""),
        ("utilisation", "GPUs in use", ".1%", "of an epoch"),
    ],
}


def table(question: Question, answer: Answer, shown: Sequence[str] = ()) -> str:
    """Return the first lines of the answer, and the sections `shown`. Raises ConfigError for one that it lacks."""
    there = [name for name in SECTIONS if answer.get(name) is not None]
    missing = next((name for name in shown if name not in (*there, "all")), None)
    if missing:
        raise ConfigError(f"--show names {missing}, but this plan has {', '.join(there)} alone; leave {missing} out")
    if "summary" in answer:
        blocks = [summary_text(heading(question), answer, there)]
    else:
        blocks, shown = [heading(question)], ("all",)
    blocks += [_section(name, answer[name]) for name in there if name in shown or "all" in shown]
    return "\n\n".join([*blocks, f"left out: {answer['omitted']}"] if "omitted" in answer else blocks)


def parse_sections(text: str) -> tuple[str, ...]:
    """Parse 'memory,modes' or 'all' into names of sections. Raises ConfigError for other names."""
    names = tuple(name.strip() for name in text.split(","))
    unknown = next((name for name in names if name not in (*SECTIONS, "all")), None)
    if unknown is not None:
        raise ConfigError(f"--show names '{unknown}', which is no section; give some of {','.join(SECTIONS)}, or all")
    return names


def heading(question: Question) -> str:
    """Return the raster, and lines of the network and its options."""
    network = question.network
    raster = f"{question.size[0]} x {question.size[1]} px, {network.bands} bands, {network.classes} classes"
    return f"{raster}\n{network.in_words}"


def _section(name: str, part: dict[str, Any]) -> str:
    if name == "modes":
        return modes_text(part)
    if name == "stages":
        return stages_text(part)
    if name == "rebuilding":
        title = f"rebuilding: a training step on {words(part['context'])} px in {size(part['budget'])}"
        return f"{title}\n{rebuilding_table(part)}"
    flat, (title, figures) = _flat(part), next(each for each in _ROWS.items() if each[0].startswith(f"{name}:"))
    rows = [
        (label, *_value(flat[key], kind, remark.format(**flat))) for key, label, kind, remark in figures if key in flat
    ]
    text = f"{title}\n{aligned(rows)}"
    return f"{text}\n\n{_layers(part)}" if name == "network" else text


def _flat(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part with keys such as exact_bytes for nested values, and the words of a GPU's memory."""
    nested = [(key, value) for key, value in part.items() if isinstance(value, dict)]
    flat = {f"{key}_{inner}": value for key, values in nested for inner, value in values.items()}
    fit = "fits" if part.get("fits") else f"does NOT fit: {part.get('remedy')}"
    return part | flat | {"fit": fit}


def _value(value: Any, kind: str, remark: str) -> tuple[str, str]:
    """Return a figure by its format, and its unit or remark."""
    if kind in ("B", "#"):
        number, unit = (size_parts if kind == "B" else count_parts)(value)
        return number, f"{unit} {remark}".strip()
    return format(value, kind) if kind else words(value), remark


def _layers(part: dict[str, Any]) -> str:
    rows = [("stage", "output (channels x rows x columns)", "parameters", "multiply-adds", "activations kept")]
    for stage in by_stage(part["by_layer"]):
        work = " ".join(count_parts(stage["multiply_adds"])).strip()
        kept = size(stage["activation_bytes"])
        rows.append((stage["name"], words(stage["shape"]), f"{stage['parameters']:,}", work, kept))
    return columns(rows)
