"""The planner's answer as aligned plain text."""

from __future__ import annotations

from tiledseg.planning.answer.modes import modes_text
from tiledseg.planning.answer.rebuilding import rebuilding_table
from tiledseg.planning.answer.report import Answer, by_stage
from tiledseg.planning.answer.stages import stages_text
from tiledseg.planning.answer.text import Row, aligned, columns, count_parts, size, size_parts, words
from tiledseg.planning.question import Question

_WEIGHTS = {"fp32": "float32", "fp64": "float64"} | {
    precision: f"float32, with the {precision} copies of autocast" for precision in ("bf16", "fp16")
}
_WINDOWS = {"exact": "with its halo", "none": "as an image of its own"}


def table(question: Question, answer: Answer) -> str:
    """Return the sections of the answer: paper, exact, network, memory, modes, stages, windows, rebuilding, cluster."""
    blocks = [heading(question)]
    if answer["paper"] is not None:
        blocks.append(f"paper: the formula, unpadded convolutions\n{_paper(question, answer['paper'])}")
    if "exact" in answer:
        blocks += [
            f"exact: what changes nothing\n{_exact(answer['exact'])}",
            f"network: on the largest context\n{_network(answer['network'])}",
            _layers(answer["network"]),
            f"memory: a training step on one tile\n{_memory(answer['memory'])}",
            modes_text(answer["modes"]),
        ]
    if "stages" in answer:
        blocks.append(stages_text(answer["stages"]))
    if "windows" in answer:
        blocks.append(f"windows: drawn anywhere, one at a time\n{_windows(answer['windows'])}")
    if "rebuilding" in answer:
        title = f"rebuilding: a training step on {words(answer['rebuilding']['context'])} px"
        blocks.append(f"{title} in {size(answer['rebuilding']['budget'])}\n{rebuilding_table(answer['rebuilding'])}")
    blocks.append(f"cluster: one tile a GPU\n{_cluster(answer['cluster'])}")
    if "omitted" in answer:
        blocks.append(f"left out: {answer['omitted']}")
    return "\n\n".join(blocks)


def heading(question: Question) -> str:
    """Return the raster, and lines of the network and its options."""
    network = question.network
    raster = f"{question.size[0]} x {question.size[1]} px, {network.bands} bands, {network.classes} classes"
    return f"{raster}\n{network.in_words}"


def _paper(question: Question, part: Answer) -> str:
    return aligned(
        [
            ("d, taken off by a convolution", words(part["shrink"]), f"px, stride {question.stride}"),
            ("halo epsilon", words(part["halo"]), "px"),
            ("tile T'", words(part["tile"]), "px"),
            ("context T = T' + 2 epsilon", words(part["context"]), "px"),
            ("efficiency E = T^2 / T'^2", f"{part['efficiency']:.4f}", "ideally 1"),
            ("its linear form", f"{part['efficiency_linear']:.4f}", ""),
        ]
    )


def _exact(part: Answer) -> str:
    even = part["halo_sides"][0] == part["halo_sides"][1]
    sides = "px" if even else f"px; before, after: {words(part['halo_sides'])}"
    return aligned(
        [
            ("alignment of core edges", words(part["alignment"]), "px"),
            ("smallest exact halo", words(part["halo_minimum"]), "px"),
            ("halo, rounded to legal sizes", words(part["halo"]), f"{sides}; {part['border']} at the raster's border"),
            ("grid", words(part["grid"]), f"rows x columns, {part['tiles']} tiles"),
            ("largest core", words(part["core_max"]), "px"),
            ("smallest core", words(part["core_min"]), "px"),
            ("largest context", words(part["context_max"]), "px"),
            ("efficiency E, whole raster", f"{part['efficiency']:.4f}", "context pixels / core pixels"),
        ]
    )


def _network(part: Answer) -> str:
    return aligned(
        [
            ("layers", words(part["layers"]), ""),
            ("parameters", f"{part['parameters']:,}", ""),
            _scaled("multiply-adds, forward", count_parts(part["multiply_adds_context"]), "a context"),
            _scaled("multiply-adds, forward", count_parts(part["multiply_adds_image"]), "an image, halos included"),
        ]
    )


def _layers(part: Answer) -> str:
    rows = [("stage", "output (channels x rows x columns)", "parameters", "multiply-adds", "activations kept")]
    for stage in by_stage(part["by_layer"]):
        work = " ".join(count_parts(stage["multiply_adds"])).strip()
        kept = size(stage["activation_bytes"])
        rows.append((stage["name"], words(stage["shape"]), f"{stage['parameters']:,}", work, kept))
    return columns(rows)


def _memory(part: Answer) -> str:
    remarks = {
        "weights": ("weights", _WEIGHTS[part["precision"]]),
        "gradients": ("gradients", "summed in float64"),
        "optimizer": ("optimizer", "AdamW"),
        "activations": ("activations kept", "with the loss"),
        "backward": ("backward pass on top", "at its worst moment"),
        "total": ("in all", "without the device's own context and workspaces"),
    }
    rows = [_scaled(label, size_parts(part[key]), remark) for key, (label, remark) in remarks.items()]
    if "fits" in part:
        fits = "fits" if part["fits"] else f"does NOT fit: {part['remedy']}"
        rows.append(_scaled("GPU", size_parts(part["gpu"]), fits))
    return aligned(rows)


def _windows(part: Answer) -> str:
    rows: list[Row] = [
        ("side", words(part["side"]), "px"),
        ("windows an epoch", f"{part['epoch']:,}", "their pixels, once"),
    ]
    for kind, remark in _WINDOWS.items():
        window = part[kind]
        rows += [
            (f"context, {remark}", words(window["context"]), "px at most"),
            ("efficiency E", f"{window['efficiency']:.4f}", "context pixels / window pixels"),
            ("a training step", *size_parts(window["bytes"])),
        ]
    return aligned(rows)


def _cluster(part: Answer) -> str:
    return aligned(
        [
            ("GPUs an image", words(part["gpus_per_image"]), ""),
            ("nodes an image", f"{part['nodes_per_image']:.2f}", f"of {part['gpus_per_node']} GPUs"),
            ("images", f"{part['images']:,}", f"{part['tiles']:,} tiles in all"),
            ("GPUs", f"{part['gpus']:,}", ""),
            ("rounds an epoch", f"{part['rounds']:,}", "a tile a GPU each"),
            ("idle GPUs, last round", f"{part['idle_gpus_last_round']:,}", ""),
            ("GPUs in use", f"{100 * part['utilisation']:.1f}", "% of an epoch"),
        ]
    )


def _scaled(label: str, parts: tuple[str, str], remark: str) -> Row:
    number, unit = parts
    return label, number, f"{unit} {remark}".strip()
