"""The planner's answer as aligned plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tiledseg.planning.answer.modes_table import modes_table, modes_title
from tiledseg.planning.answer.question import Question
from tiledseg.planning.answer.report import Answer, by_stage
from tiledseg.planning.stages_table import stages_table, stages_title

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_COUNTS = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_WEIGHTS = {"fp32": "float32", "fp64": "float64", "bf16": "float32, with the bf16 copies of autocast"}
Row = tuple[str, str, str]  # label, value, unit or remark


def table(question: Question, answer: Answer) -> str:
    """Sections paper, exact, network, memory, modes, stages and cluster; those that the answer lacks are left out."""
    sections = [("paper: the formula, unpadded convolutions", _paper(question, answer["paper"]))]
    if "exact" in answer:
        sections += [
            ("exact: what changes nothing", _exact(answer["exact"])),
            ("network: on the largest context", _network(question, answer["network"])),
            ("memory: a training step on one tile", _memory(answer["memory"])),
        ]
    sections.append(("cluster: one tile a GPU", _cluster(answer["cluster"])))
    blocks = [heading(question), *(f"{title}\n{_aligned(rows)}" for title, rows in sections)]
    if "exact" in answer:
        blocks.insert(4, _stages(answer["network"]))
        blocks.insert(6, f"{modes_title(answer['modes'])}\n{modes_table(answer['modes'], size)}")
    if "stages" in answer:
        blocks.insert(7, f"{stages_title(answer['stages'])}\n{stages_table(answer['stages'], size)}")
    if "omitted" in answer:
        blocks.append(f"left out: {answer['omitted']}")
    return "\n\n".join(blocks)


def heading(question: Question) -> str:
    """Three lines: the raster, the network, its options."""
    network = question.network
    words = [
        f"{question.size[0]} x {question.size[1]} px, {network.bands} bands, {network.classes} classes",
        f"U-Net of {network.levels} levels, {network.convs_per_level} convolutions a level, "
        f"kernel {network.kernel} x {network.kernel}, {network.base_channels} base channels",
        f"padding {network.padding}, upsampling {network.upsampling}, norm {network.norm}",
    ]
    return "\n".join(words)


def _paper(question: Question, part: Answer) -> list[Row]:
    return [
        ("d, taken off by a convolution", _text(part["shrink"]), f"px, stride {question.stride}"),
        ("halo epsilon", _text(part["halo"]), "px"),
        ("tile T'", _text(part["tile"]), "px"),
        ("context T = T' + 2 epsilon", _text(part["context"]), "px"),
        ("efficiency E = T^2 / T'^2", f"{part['efficiency']:.4f}", "ideally 1"),
        ("its linear form", f"{part['efficiency_linear']:.4f}", ""),
    ]


def _exact(part: Answer) -> list[Row]:
    sides = (
        "px" if part["halo_sides"][0] == part["halo_sides"][1] else f"px; before, after: {_text(part['halo_sides'])}"
    )
    return [
        ("alignment of core edges", _text(part["alignment"]), "px"),
        ("smallest exact halo", _text(part["halo_minimum"]), "px"),
        ("halo, rounded to legal sizes", _text(part["halo"]), f"{sides}; {part['border']} at the raster's border"),
        ("grid", _text(part["grid"]), f"rows x columns, {part['tiles']} tiles"),
        ("largest core", _text(part["core_max"]), "px"),
        ("smallest core", _text(part["core_min"]), "px"),
        ("largest context", _text(part["context_max"]), "px"),
        ("efficiency E, whole raster", f"{part['efficiency']:.4f}", "context pixels / core pixels"),
    ]


def _network(question: Question, part: Answer) -> list[Row]:
    return [
        ("layers", _text(part["layers"]), ""),
        ("parameters", f"{part['parameters']:,}", ""),
        ("multiply-adds, forward", *_count(part["multiply_adds_context"], "a context")),
        ("multiply-adds, forward", *_count(part["multiply_adds_image"], "an image, halos included")),
    ]


def _stages(part: Answer) -> str:
    head = ("stage", "output (channels x rows x columns)", "parameters", "multiply-adds", "activations kept")
    rows = [
        (
            s["name"],
            _text(s["shape"]),
            f"{s['parameters']:,}",
            " ".join(_count(s["multiply_adds"], "")).strip(),
            size(s["activation_bytes"]),
        )
        for s in by_stage(part["by_layer"])
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, *rows)]
    return "\n".join("  " + "  ".join(line) for line in lines)


def _memory(part: Answer) -> list[Row]:
    rows = [
        ("weights", *_size(part["weights"]), _WEIGHTS[part["precision"]]),
        ("gradients", *_size(part["gradients"]), "summed in float64"),
        ("optimizer", *_size(part["optimizer"]), "AdamW"),
        ("activations kept", *_size(part["activations"]), "with the loss"),
        ("backward pass on top", *_size(part["backward"]), "at its worst moment"),
        ("in all", *_size(part["total"]), "without the device's own context and workspaces"),
    ]
    if "fits" in part:
        rows.append(("GPU", *_size(part["gpu"]), "fits" if part["fits"] else "does NOT fit: use a finer grid"))
    return [(label, value, f"{unit} {remark}".strip()) for label, value, unit, remark in rows]


def _cluster(part: Answer) -> list[Row]:
    return [
        ("GPUs an image", _text(part["gpus_per_image"]), ""),
        ("nodes an image", f"{part['nodes_per_image']:.2f}", f"of {part['gpus_per_node']} GPUs"),
        ("images", f"{part['images']:,}", f"{part['tiles']:,} tiles in all"),
        ("GPUs", f"{part['gpus']:,}", ""),
        ("rounds an epoch", f"{part['rounds']:,}", "a tile a GPU each"),
        ("idle GPUs, last round", f"{part['idle_gpus_last_round']:,}", ""),
        ("GPUs in use", f"{100 * part['utilisation']:.1f}", "% of an epoch"),
    ]


def _aligned(rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}".rstrip() for a, b, c in rows)


def _text(value: Any) -> str:
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


def _size(count: int) -> tuple[str, str]:
    for unit, word in _UNITS:
        if count >= unit:
            return f"{count / unit:.2f}", word
    return str(count), "B"


def size(count: int) -> str:
    """Bytes in the largest fitting unit, '5.39 GiB'."""
    return " ".join(_size(count))


def _count(value: int, remark: str) -> tuple[str, str]:
    for unit, word in _COUNTS:
        if value >= unit:
            return f"{value / unit:.2f}", f"{word} {remark}".strip()
    return str(value), remark
