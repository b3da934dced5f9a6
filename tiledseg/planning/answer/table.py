"""The planner's answer as aligned plain text."""

from __future__ import annotations

from tiledseg.planning.answer.modes import modes_table, modes_title
from tiledseg.planning.answer.rebuilding import rebuilding_table
from tiledseg.planning.answer.report import Answer, by_stage
from tiledseg.planning.answer.stages import stages_table, stages_title
from tiledseg.planning.answer.text import Row, aligned, columns, count_parts, size, size_parts, words
from tiledseg.planning.answer.windows import windows_table
from tiledseg.planning.question import Question

_WEIGHTS = {"fp32": "float32", "fp64": "float64"} | {
    precision: f"float32, with the {precision} copies of autocast" for precision in ("bf16", "fp16")
}


def table(question: Question, answer: Answer) -> str:
    """Sections paper, exact, network, memory, modes, stages, windows, rebuilding, cluster; those that are there."""
    blocks = [heading(question)]
    if answer["paper"] is not None:
        blocks.append(f"paper: the formula, unpadded convolutions\n{_paper(question, answer['paper'])}")
    if "exact" in answer:
        blocks += [
            f"exact: what changes nothing\n{_exact(answer['exact'])}",
            f"network: on the largest context\n{_network(answer['network'])}",
            _stages(answer["network"]),
            f"memory: a training step on one tile\n{_memory(answer['memory'])}",
            f"{modes_title(answer['modes'])}\n{modes_table(answer['modes'])}",
        ]
    if "stages" in answer:
        blocks.append(f"{stages_title(answer['stages'])}\n{stages_table(answer['stages'], size)}")
    if "windows" in answer:
        blocks.append(f"windows: drawn anywhere, one at a time\n{windows_table(answer['windows'])}")
    if "rebuilding" in answer:
        title = f"rebuilding: a training step on {words(answer['rebuilding']['context'])} px"
        blocks.append(f"{title} in {size(answer['rebuilding']['budget'])}\n{rebuilding_table(answer['rebuilding'])}")
    blocks.append(f"cluster: one tile a GPU\n{_cluster(answer['cluster'])}")
    if "omitted" in answer:
        blocks.append(f"left out: {answer['omitted']}")
    return "\n\n".join(blocks)


def heading(question: Question) -> str:
    """The raster, and lines of the network and its options."""
    network = question.network
    raster = f"{question.size[0]} x {question.size[1]} px, {network.bands} bands, {network.classes} classes"
    return f"{raster}\n{network.in_words}"


def _paper(question: Question, part: Answer) -> str:
    rows = [
        ("d, taken off by a convolution", words(part["shrink"]), f"px, stride {question.stride}"),
        ("halo epsilon", words(part["halo"]), "px"),
        ("tile T'", words(part["tile"]), "px"),
        ("context T = T' + 2 epsilon", words(part["context"]), "px"),
        ("efficiency E = T^2 / T'^2", f"{part['efficiency']:.4f}", "ideally 1"),
        ("its linear form", f"{part['efficiency_linear']:.4f}", ""),
    ]
    return aligned(rows)


def _exact(part: Answer) -> str:
    even = part["halo_sides"][0] == part["halo_sides"][1]
    sides = "px" if even else f"px; before, after: {words(part['halo_sides'])}"
    rows = [
        ("alignment of core edges", words(part["alignment"]), "px"),
        ("smallest exact halo", words(part["halo_minimum"]), "px"),
        ("halo, rounded to legal sizes", words(part["halo"]), f"{sides}; {part['border']} at the raster's border"),
        ("grid", words(part["grid"]), f"rows x columns, {part['tiles']} tiles"),
        ("largest core", words(part["core_max"]), "px"),
        ("smallest core", words(part["core_min"]), "px"),
        ("largest context", words(part["context_max"]), "px"),
        ("efficiency E, whole raster", f"{part['efficiency']:.4f}", "context pixels / core pixels"),
    ]
    return aligned(rows)


def _network(part: Answer) -> str:
    rows = [
        ("layers", words(part["layers"]), ""),
        ("parameters", f"{part['parameters']:,}", ""),
        _scaled("multiply-adds, forward", count_parts(part["multiply_adds_context"]), "a context"),
        _scaled("multiply-adds, forward", count_parts(part["multiply_adds_image"]), "an image, halos included"),
    ]
    return aligned(rows)


def _stages(part: Answer) -> str:
    head = ("stage", "output (channels x rows x columns)", "parameters", "multiply-adds", "activations kept")
    rows = [
        (
            s["name"],
            words(s["shape"]),
            f"{s['parameters']:,}",
            " ".join(count_parts(s["multiply_adds"])).strip(),
            size(s["activation_bytes"]),
        )
        for s in by_stage(part["by_layer"])
    ]
    return columns([head, *rows])


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
        said = "fits" if part["fits"] else f"does NOT fit: {part['remedy']}"
        rows.append(_scaled("GPU", size_parts(part["gpu"]), said))
    return aligned(rows)


def _cluster(part: Answer) -> str:
    rows = [
        ("GPUs an image", words(part["gpus_per_image"]), ""),
        ("nodes an image", f"{part['nodes_per_image']:.2f}", f"of {part['gpus_per_node']} GPUs"),
        ("images", f"{part['images']:,}", f"{part['tiles']:,} tiles in all"),
        ("GPUs", f"{part['gpus']:,}", ""),
        ("rounds an epoch", f"{part['rounds']:,}", "a tile a GPU each"),
        ("idle GPUs, last round", f"{part['idle_gpus_last_round']:,}", ""),
        ("GPUs in use", f"{100 * part['utilisation']:.1f}", "% of an epoch"),
    ]
    return aligned(rows)


def _scaled(label: str, parts: tuple[str, str], remark: str) -> Row:
    number, unit = parts
    return label, number, f"{unit} {remark}".strip()
