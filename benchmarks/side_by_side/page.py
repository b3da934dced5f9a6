"""The tables of what was measured in README.md, where rows in which a peer is better stand first, and in tables.md."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.maps import CROPS, base_of
from benchmarks.side_by_side.peers import PEERS
from benchmarks.side_by_side.spatial import OURS, STEPS
from benchmarks.spread import Spread, markdown

Results = dict[str, Any]
Row = Sequence[object]
PARTS = ("layers", "networks", "cost", "maps", "pipelines")
PHASES = ("forward", "backward", "gradients")
WRONG = {
    "a block of": "a block is said to be the whole, or has another size",
    "no gradient": "gradients are lost silently",
}
EXACT, CLEAR = 1e-10, 0.97  # in float64; a ratio below is a difference, not noise
OF_DISTDL = (
    "its messages go through MPI's shared memory, ours through Gloo's sockets. Least of 20 turns on 2 ranks: 142 ms, "
    "ours 179, ours over MPI 137; on 4 ranks 105, 157, 137. stays: GPUs speak by NCCL"
)
OF_VERIFY = "`verify`, once a module: without it {ratios[tiledseg, without `verify`]:.2f}; stays"
OF_TILES = "tiles as large as memory allows: {near[tiledseg, without `verify`, `grid=4`][MiB]:.0f} with `grid=4`; stays"
OF_CHECK = "a call copies and checks the module (0.25 s), and reads options (0.1 s), by cProfile; stays"
OF_COPY = "the copy of the module, and its check on crops: 49 MiB before the map; stays"
WHY_OF_MAPS = (OURS, OF_VERIFY, OF_TILES), (CROPS, OF_CHECK, OF_COPY)  # of our way: of its seconds, and of its memory
WHY_OF_COSTS = {  # and the ends of what is counted
    "messages": ("corners are messages too", "messages", "calls"),
    "bytes": ("gradients are summed in float64 (`docs/decisions/0003`)", "bytes"),
}
WRITTEN = {  # the functions of each job that a user would write
    "tiledseg": "tiledseg_step",
    "torch DTensor": "_sharded dtensor_step",
    "ShardTensor": "_sharded shardtensor_step",
    "DistDL": "Spread twin replace step_of",
    "map, tiledseg": "by_tiledseg",
    "map, MONAI": "_of_image by_monai",
    "map, terratorch": "_of_image by_terratorch",
    "pipeline, tiledseg": "tiledseg_pipeline",
    "pipeline, torch.distributed.pipelining": "torch_pipeline",
    "pipeline, torchgpipe": "give_threads Passing torchgpipe_pipeline",
}


def written(job: str) -> int:
    """Return how many lines the job's functions take, without blank lines."""
    texts = [file.read_text() for file in Path(__file__).parent.glob("*.py")]
    nodes = [(node, text.splitlines()) for text in texts for node in ast.parse(text).body]
    names = WRITTEN[job].split()
    own = [(node, lines) for node, lines in nodes if getattr(node, "name", "") in names]
    return sum(bool(line.strip()) for node, lines in own for line in lines[node.lineno - 1 : node.end_lineno])


def state(found: Results | None) -> str:
    """Return the cell of an item: exact to what, approximate by how much, an error's words, or a refusal's."""
    if not found:
        return "not run"
    for word in ("refused", "error", "absent"):
        if word in found:
            words = " ".join(str(found[word]).replace("|", "/").split())
            words = words.removeprefix("the module cannot be computed exactly on tiles: (1) ")
            wrong = next((f"**wrong**: {of}" for start, of in WRONG.items() if words.startswith(start)), "")
            return wrong or f"{word}: {words[:70]}{'...' if len(words) > 70 else ''}"
    far = max(found[key] for key in ("y", "dx", "dW"))
    worst = ", ".join(f"{key} {found[key]:.0e}" for key in ("y", "dx", "dW") if not found[key] <= EXACT)
    return f"exact, {far:.0e}" if far <= EXACT else f"**wrong**: {worst}"


def is_exact(found: Results | None) -> bool:
    return state(found).startswith("exact")


def less(ratios: Sequence[float], own: Sequence[float] = (1.0,)) -> bool:
    """Return True where a peer is better: three of four turns show it, and the median is below three of four turns of
    two copies of ours."""
    noise = min(1.0, sorted(own)[len(own) // 4])
    return statistics.median(ratios) < CLEAR * noise and sorted(ratios)[3 * len(ratios) // 4] < 1


def better(results: Results) -> Iterator[Row]:
    """Give the rows in which a peer is better: question, peer and its figure, ours, measured cause and what will be."""
    for part in ("layers", "networks"):
        for item, mine in results.get(part, {}).get(OURS, {}).items():
            others = [peer for peer, items in results[part].items() if peer != OURS and is_exact(items.get(item))]
            if others and not is_exact(mine):
                yield item, f"{', '.join(others)}: exact", state(mine), "`docs/reference/foreign-networks.md`"
    cost = results.get("cost", {})
    pairs = [(item, peer, cost[peer].get(item, {}), mine) for item, mine in cost.get(OURS, {}).items() for peer in cost]
    for item, peer, found, mine in pairs:
        if peer == OURS or "ratio" not in found or "ratio" not in mine:
            continue
        for key, (why, *ends) in WHY_OF_COSTS.items():
            sums = [[sum(of.get(f"{phase} {end}", 0) for end in ends) for of in (found, mine)] for phase in PHASES]
            theirs, ours = map(sum, zip(*sums, strict=True))
            if theirs < CLEAR * ours:
                named = zip(PHASES, sums, strict=True)
                parts = ", ".join(f"{phase} {own:,} to {other:,}" for phase, (other, own) in named)
                words = f"ours to its: {parts}; {why}; stays"
                yield f"{key} of a step: {item}", f"{peer}: {theirs:,}", f"{ours:,}", words
        if less(found["ratio"], mine["ratio"]):
            why = OF_DISTDL if peer == "DistDL" else "not found"
            yield f"seconds of a step: {item}", f"{peer}: {statistics.median(found['ratio']):.3g}", "1", why
        if found["MiB"] < CLEAR * mine["MiB"]:
            yield f"MiB of a step: {item}", f"{peer}: {found['MiB']}", mine["MiB"], "not found"
    maps = results.get("maps", {})
    for base, of_seconds, of_memory in WHY_OF_MAPS:
        near = {way: each for way, each in maps.items() if base_of(way) == base and "ratio" in each}
        ratios = {way: statistics.median(each["ratio"]) for way, each in near.items()}
        peers = {way: each for way, each in near.items() if not way.startswith(OURS)}
        quick = [f"{way}: {ratios[way]:.2f}" for way, each in peers.items() if less(each["ratio"])]
        small = [f"{way}: {each['MiB']:.0f}" for way, each in peers.items() if each["MiB"] < CLEAR * near[base]["MiB"]]
        if quick:
            yield "processor seconds of a map", "; ".join(quick), "1", of_seconds.format(ratios=ratios)
        if small:
            yield "MiB of a map", "; ".join(small), f"{near[base]['MiB']:.0f}", of_memory.format(near=near)
    runs = {peer: each["speed_up"] for peer, each in results.get("pipelines", {}).items() if "speed_up" in each}
    medians = {peer: statistics.median(speeds) for peer, speeds in runs.items()}
    for peer in (peer for peer, value in medians.items() if value * CLEAR > medians.get(OURS, value)):
        faster, slower = f"{peer}: {medians[peer]:.2f}", f"{medians[OURS]:.2f}"
        yield "speed-up of a pipeline", faster, slower, "see the spread of turns"


def pages(results: Results) -> dict[str, str]:
    """Return the pages by name: their words as they are, with tables anew, which the first cell of a head names."""
    made = {head[0]: markdown(head, rows) for head, rows in tables(results)}
    texts = {name: Path(__file__).with_name(name).read_text() for name in ("README.md", "tables.md")}
    parts = {name: [part.strip("\n") for part in text.split("\n\n")] for name, text in texts.items()}
    return {
        name: "\n\n".join(made.get(part[2:].partition(" |")[0], part) for part in parts[name]) + "\n" for name in texts
    }


def tables(results: Results) -> Iterator[tuple[Sequence[str], list[Row]]]:
    """Give the head and the rows of each table."""
    yield ("question", "better", "tiledseg", "measured cause, and whether it will change"), [*better(results)]
    parts = {part: results.get(part, {}) for part in PARTS}
    yield ("exact", *STEPS), [(part, *(_share(parts[part].get(peer, {})) for peer in STEPS)) for part in PARTS[:2]]
    words = {name: " ".join((peer.absent or peer.changed).split()) for name, peer in PEERS.items()}
    known = {name: results.get("versions", {}).get(name) or "not here" for name in PEERS}
    rows: list[Row] = [(name, known[name], peer.where, words[name]) for name, peer in PEERS.items()]
    yield ("peer", "version", "from", "changed, or why not run"), rows
    times = results.get("times", {})
    each = [f"{times[part][0]} min, load {times[part][1]}, {times[part][2]}" if part in times else "" for part in PARTS]
    whole = f"{sum(minutes for minutes, *_ in times.values()):.0f} min"
    yield ("machine", *PARTS, "all"), [(results.get("machine", ""), *each, whole)]
    for part in PARTS[:2]:
        items = list(dict.fromkeys(item for each in parts[part].values() for item in each))
        rows = [(item, *(state(parts[part].get(peer, {}).get(item)) for peer in STEPS)) for item in items]
        yield (part, *STEPS), rows
    head = "network, ranks", "who", *PHASES, "MiB a rank", "seconds", "over ours", "CPU over ours", "lines of code"
    of = parts["cost"]
    yield head, [_cost(item, peer, of[peer][item]) for item in of.get(OURS, {}) for peer in of if item in of[peer]]
    ways = "way", "seconds", "processor seconds", "over ours", "MiB", "pixels unlike the whole image's", "lines of code"
    yield ways, [_map(way, each) for way, each in parts["maps"].items()]
    rows = [(peer, *_pipe(each), written(f"pipeline, {peer}")) for peer, each in parts["pipelines"].items()]
    yield ("pipeline", "speed-up", "bytes", "gradients differ by", "lines of code"), rows


def _share(items: Results) -> str:
    there = [found for found in items.values() if "absent" not in found]
    return f"{sum(map(is_exact, there))} of {len(there)}"


def _cost(item: str, peer: str, found: Results) -> Row:
    if "ratio" not in found:
        return item, peer, state(found)
    parts = [[found.get(f"{phase} {end}", 0) for end in ("messages", "calls", "bytes")] for phase in PHASES]
    cells = [f"{messages} + {calls}, {size / 1e6:.3f} MB" for messages, calls, size in parts]
    over = [Spread.of(found[key]) for key in ("ratio", "cpu")]
    return item, peer, *cells, found["MiB"], found["seconds"], *over, written(peer)


def _map(way: str, each: Results) -> Row:
    if "seconds" not in each:
        return way, state(each)
    wrong = "" if each["wrong"] is None else f"{each['wrong']:,} of {each['pixels']:,}"
    cells = f"{each['seconds']:.1f}", f"{each['cpu']:.1f}", Spread.of(each.get("ratio", [1])), round(each["MiB"])
    return way, *cells, wrong, written(f"map, {way.partition(',')[0]}")


def _pipe(each: Results) -> Row:
    if "speed_up" not in each:
        return state(each), "", ""
    return Spread.of(each["speed_up"]), f"{each['bytes']:,}", f"{each['far']:.0e}"
