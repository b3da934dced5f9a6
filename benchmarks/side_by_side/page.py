"""The pages of what was measured: README.md, in which rows where a peer is better stand first, and tables.md."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.side_by_side.maps import TWICE, base_of
from benchmarks.side_by_side.peers import PEERS
from benchmarks.side_by_side.spatial import OURS, STEPS
from benchmarks.spread import Spread, markdown

Results = dict[str, Any]
Row = Sequence[object]
PARTS = ("layers", "networks", "cost", "maps", "pipelines")
PHASES = ("forward", "backward", "gradients")
WRONG = {
    "a block of the output is": "a block is said to be the whole, or has another size",
    "no gradient ": "gradients are lost without a word",
}
EXACT, CLEAR = 1e-10, 0.97  # in float64; a ratio below is a difference, not noise
WRITTEN = {  # the functions that a user would write for each job, in these files
    OURS: ("spatial", "tiledseg_step"),
    "torch DTensor": ("spatial", "_sharded", "dtensor_step"),
    "torch DTensor, older rule": ("spatial", "_sharded", "dtensor_step", "older_dtensor_step"),
    "ShardTensor": ("spatial", "_sharded", "shardtensor_step"),
    "DistDL": ("distdl_layers", "Spread", "twin", "replace", "step_of"),
    "map, tiledseg": ("maps", "by_tiledseg"),
    "map, MONAI": ("maps", "_of_image", "by_monai"),
    "map, terratorch": ("maps", "_of_image", "by_terratorch"),
    "pipeline, tiledseg": ("pipelines", "tiledseg_pipeline"),
    "pipeline, torch.distributed.pipelining": ("pipelines", "torch_pipeline"),
    "pipeline, torchgpipe": ("pipelines", "torchgpipe_pipeline"),
}


def written(job: str) -> int:
    """Return how many lines the job's functions take, without blank lines."""
    file, *names = WRITTEN[job]
    text = Path(__file__).with_name(f"{file}.py").read_text()
    nodes = [node for node in ast.parse(text).body if getattr(node, "name", "") in names]
    return sum(bool(line.strip()) for node in nodes for line in text.splitlines()[node.lineno - 1 : node.end_lineno])


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


def better(results: Results) -> Iterator[Row]:
    """Give the rows in which a peer is better: question, peer and its figure, ours, measured cause and what will be."""
    for part in ("layers", "networks"):
        for item, mine in results.get(part, {}).get(OURS, {}).items():
            others = [peer for peer, items in results[part].items() if peer != OURS and is_exact(items.get(item))]
            if others and not is_exact(mine):
                why = "not taken (`docs/reference/foreign-networks.md`)"
                yield item, f"{', '.join(others)}: exact", state(mine), why
    for peer, runs in results.get("cost", {}).items():
        for item, found in runs.items() if peer != OURS else ():
            mine = results["cost"].get(OURS, {}).get(item, {})
            if "ratio" in found and "ratio" in mine:
                theirs, own = figures(found), figures(mine) | {"seconds": 1.0}
                for key in (key for key, value in theirs.items() if value < CLEAR * own[key]):
                    yield (
                        f"{key} of a step: {item}",
                        f"{peer}: {theirs[key]:,.4g}",
                        f"{own[key]:,.4g}",
                        why_of(key, found, mine),
                    )
        if peer != OURS and any("ratio" in found for found in runs.values()) and written(peer) < written(OURS):
            yield "lines of a step", f"{peer}: {written(peer)}", written(OURS), "the loop cuts its block itself; stays"
    found = results.get("maps", {})
    for way, each in found.items():
        base = base_of(way)
        mine = found.get(base, {})
        if not way.startswith(OURS) and "ratio" in each and "MiB" in mine:
            more = found.get(f"{base}{TWICE}" if "crops" in way else "tiledseg, without `verify`, `grid=4`", mine)
            ratio = statistics.median(each["ratio"])
            if ratio < CLEAR:
                why = f"looks at the module, once: {mine['cpu'] - each['cpu']:.1f} s; see twice the side"
                if "crops" not in way:
                    plain = statistics.median(found["tiledseg, without `verify`"]["ratio"])
                    why = f"`verify`, once a module: without it {plain:.2f}; stays"
                yield "processor seconds of a map", f"{way}: {ratio:.2f}", "1", why
            if each["MiB"] < CLEAR * mine["MiB"]:
                why = f"with `grid=4` {more['MiB']:.0f}; tiles are as large as memory allows; stays"
                if "crops" in way:
                    theirs = found[f"MONAI, of crops{TWICE}"]["MiB"]
                    why = f"looks at the module, once; at twice the side {more['MiB']:.0f} to {theirs:.0f}"
                yield "MiB of a map", f"{way}: {each['MiB']:.0f}", f"{mine['MiB']:.0f}", why
    pipes = results.get("pipelines", {})
    speeds = {peer: statistics.median(each["speed_up"]) for peer, each in pipes.items() if "speed_up" in each}
    for peer, value in speeds.items():
        if peer != OURS and value > speeds.get(OURS, value) / CLEAR:
            why = "the balance goes by multiply-adds; `balance` takes another"
            yield "speed-up of a pipeline", f"{peer}: {value:.2f}", f"{speeds[OURS]:.2f}", why


def why_of(key: str, theirs: Results, ours: Results) -> str:
    """Return the parts in which a step costs more than a peer's, as measured."""
    if key in ("MiB", "seconds"):
        return {"MiB": "see the shapes at the peak", "seconds": "see processor seconds, and the spread of turns"}[key]
    names = ("messages", "calls") if key == "messages" else ("bytes",)
    pairs = {phase: [sum(of.get(f"{phase} {name}", 0) for name in names) for of in (ours, theirs)] for phase in PHASES}
    parts = ", ".join(f"{phase} {mine:,} to {other:,}" for phase, (mine, other) in pairs.items())
    why = "gradients are summed in float64 (`docs/decisions/0003`)" if key == "bytes" else "corners are messages too"
    return f"{parts}: {why}; stays"


def figures(found: Results) -> dict[str, float]:
    """Return a step's seconds over ours, messages with calls, their bytes, and MiB."""
    sums = {
        end: sum(value for key, value in found.items() if key.endswith(f" {end}"))
        for end in ("messages", "calls", "bytes")
    }
    both = {"messages": sums["messages"] + sums["calls"], "bytes": sums["bytes"], "MiB": found["MiB"]}
    return {"seconds": statistics.median(found["ratio"]), **both}


def pages(results: Results) -> dict[str, str]:
    """Return the pages by name."""
    times = [f"{key.partition(':')[0]} {value}" for key, value in results.items() if key.endswith(": measured")]
    absent = [part for part in PARTS if len(results.get(part, {})) < 2]
    worse = [*better(results), *((f"{part}: not measured beside others yet", "", "", "") for part in absent)]
    counts = [(peer, *(_count(results, part, peer) for part in ("layers", "networks"))) for peer in STEPS]
    known = results.get("versions", {})
    versions = [
        (name, known.get(name) or "not here", peer.where, " ".join((peer.absent or peer.changed).split()))
        for name, peer in PEERS.items()
    ]
    readme = f"""# Side by side with other libraries

Layers, networks, maps and pipelines run by other libraries and by tiledseg on the same work, here.

```
python -m benchmarks.side_by_side                     # every part; --only maps: one of them
python -m benchmarks.side_by_side --only cost --items U-Net --peers ShardTensor tiledseg
```

## Where another is better
{markdown(("question", "better", "tiledseg", "measured cause, and whether it will change"), worse)}

## Exact, of those that were run
{markdown(("2 ranks, float64", "kinds of layers", "networks of others"), counts)}

Exact: y, dx and dW differ from one process on the whole image by at most 1e-10 of the largest. Every row, costs, maps
and pipelines: `tables.md`. Which library for which job: `docs/choosing.md`.

## Versions, and what was changed to make each run
{markdown(("peer", "version", "from", "changed, or why not run"), versions)}

Machine: {results.get("machine", "")}. The whole: {results.get("elapsed", "")}. Day, seconds and load of each part:
{"; ".join(times)}.
"""
    return {"README.md": readme, "tables.md": "\n\n".join(_tables(results)) + "\n"}


def _count(results: Results, part: str, peer: str) -> str:
    items = {item: found for item, found in results.get(part, {}).get(peer, {}).items() if "absent" not in found}
    return f"{sum(map(is_exact, items.values()))} of {len(items)}" if items else "not run"


def _tables(results: Results) -> Iterator[str]:
    yield "# Tables of the comparison\n\nMade by `python -m benchmarks.side_by_side` (README.md)."
    for part in ("layers", "networks"):
        of = results.get(part, {})
        items = list(dict.fromkeys(item for each in of.values() for item in each))
        rows = [(item, *(state(of.get(peer, {}).get(item)) for peer in STEPS)) for item in items]
        yield f"## {part.capitalize()}: y, dx, dW on 2 ranks beside the whole image\n{markdown((part, *STEPS), rows)}"
    head = ("network, ranks", "who", *PHASES, "MiB a rank", "seconds", "over ours", "CPU over ours")
    cost = results.get("cost", {})
    runs = [(item, peer, of[item]) for item in cost.get(OURS, {}) for peer, of in cost.items() if item in of]
    failed = [f"{item}, {peer}: {state(found)}" for item, peer, found in runs if "ratio" not in found]
    yield f"""## Cost of a training step, 384 x 384 px, float32
Messages + collective calls of all ranks, with the bytes that ranks hand over: operations of torch.distributed, for
DistDL those of mpi4py, in its forward and backward pass and in the sum of gradients after it. MiB: the most bytes of
tensors that a rank makes and holds in its first step. Seconds, and processor seconds of all ranks, over those of
tiledseg by turns in the same processes and over the same transport (Gloo, for DistDL MPI). "no halo": convolutions of
1 x 1, and a transposed one.
Lines of code for the step, given a module: {", ".join(f"{peer} {written(peer)}" for peer in STEPS)}.
{markdown(head, [_cost(*run) for run in runs if "ratio" in run[2]])}

Without costs: {"; ".join(failed)}."""
    found = {way: each for way, each in results.get("maps", {}).items() if isinstance(each, dict)}
    head = ("way", "seconds", "processor seconds", "over ours", "MiB", "pixels unlike the whole image's")
    lines = ", ".join(f"{who} {written(f'map, {who}')}" for who in ("tiledseg", "MONAI", "terratorch"))
    yield f"""## Maps of one scene, one thread
File to file. Processor seconds over ours, by turns. MiB above those before the map. Single unlike
pixels are rounding of float32. Lines of code: {lines}.
{markdown(head, [(way, *_map(each)) for way, each in found.items()])}"""
    rows = [(peer, *_pipe(each), written(f"pipeline, {peer}")) for peer, each in results.get("pipelines", {}).items()]
    yield f"""## Pipelines of 2 stages
A U-Net, 8 micro-batches of 192 px, float32. Seconds of one process over those of the pipeline, by turns. torchgpipe's
stages are threads of one process, and send nothing.
{markdown(("who", "speed-up", "bytes", "gradients differ by", "lines of code"), rows)}"""


def _cost(item: str, peer: str, found: Results) -> Row:
    parts = [[found.get(f"{phase} {end}", 0) for end in ("messages", "calls", "bytes")] for phase in PHASES]
    cells = [f"{messages} + {calls}, {size / 1e6:.3f} MB" for messages, calls, size in parts]
    over = [Spread.of(found[key]) if peer != OURS else 1 for key in ("ratio", "cpu")]
    return item, peer, *cells, found["MiB"], found["seconds"], *over


def _map(each: Results) -> Row:
    if "seconds" not in each:
        return "", "", "", "", state(each)
    wrong = "" if each["wrong"] is None else f"{each['wrong']:,} of {each['pixels']:,}"
    return f"{each['seconds']:.1f}", f"{each['cpu']:.1f}", Spread.of(each.get("ratio", [1])), round(each["MiB"]), wrong


def _pipe(each: Results) -> Row:
    if "speed_up" not in each:
        return state(each), "", ""
    return Spread.of(each["speed_up"]), f"{each['bytes']:,}", f"{each['far']:.0e}"
