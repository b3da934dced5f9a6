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
    "a block of": "a block is said to be the whole, or has another size",
    "no gradient": "gradients are lost silently",
}
EXACT, CLEAR = 1e-10, 0.97  # in float64; a ratio below is a difference, not noise
WRITTEN = """  # each job's file, and the functions in it that a user would write
tiledseg: spatial tiledseg_step
torch DTensor: spatial _sharded dtensor_step
torch DTensor, older rule: spatial _sharded dtensor_step older_dtensor_step
ShardTensor: spatial _sharded shardtensor_step
DistDL: distdl_layers Spread twin replace step_of
map, tiledseg: maps by_tiledseg
map, MONAI: maps _of_image by_monai
map, terratorch: maps _of_image by_terratorch
pipeline, tiledseg: pipelines tiledseg_pipeline
pipeline, torch.distributed.pipelining: pipelines torch_pipeline
pipeline, torchgpipe: pipelines torchgpipe_pipeline
"""


def written(job: str) -> int:
    """Return how many lines the job's functions take, without blank lines."""
    file, *names = next(
        line.removeprefix(job + ": ") for line in WRITTEN.splitlines() if line.startswith(job + ":")
    ).split()
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
                yield item, f"{', '.join(others)}: exact", state(mine), "`docs/reference/foreign-networks.md`"
    for peer, runs in results.get("cost", {}).items():
        pairs = [(item, found, results["cost"].get(OURS, {}).get(item, {})) for item, found in runs.items()]
        for item, found, mine in pairs if peer != OURS else ():
            if "ratio" in found and "ratio" in mine:
                theirs, own = figures(found), figures(mine) | {"seconds": 1.0}
                for key in (key for key, value in theirs.items() if value < CLEAR * own[key]):
                    why = why_of(key, found, mine)
                    yield f"{key} of a step: {item}", f"{peer}: {theirs[key]:,.4g}", f"{own[key]:,.4g}", why
    found = results.get("maps", {})
    for way, each in found.items():
        mine = found.get(base_of(way), {})
        if not way.startswith(OURS) and "ratio" in each and "MiB" in mine:
            more, other = (found.get(f"{name}{TWICE}", each) for name in (base_of(way), "MONAI, of crops"))
            why = f"looks at the module, once: {mine['cpu'] - each['cpu']:.1f} s, {mine['MiB'] - each['MiB']:.0f} MiB"
            twice = f"{more['cpu']:.1f} s to MONAI's {other['cpu']:.1f}, {more['MiB']:.0f} MiB to {other['MiB']:.0f}"
            whys = [f"{why if way.endswith(TWICE) else f'{why}; at twice the side {twice}'}; stays"] * 2
            if "crops" not in way:
                plain, small = (found[f"tiledseg, without `verify`{end}"] for end in ("", ", `grid=4`"))
                whys[0] = f"`verify`, once a module: without it {statistics.median(plain['ratio']):.2f}; stays"
                whys[1] = f"tiles as large as memory allows: {small['MiB']:.0f} with `grid=4`; stays"
            ratio = statistics.median(each["ratio"])
            if ratio < CLEAR:
                yield "processor seconds of a map", f"{way}: {ratio:.2f}", "1", whys[0]
            if each["MiB"] < CLEAR * mine["MiB"]:
                yield "MiB of a map", f"{way}: {each['MiB']:.0f}", f"{mine['MiB']:.0f}", whys[1]
    speeds = {peer: each["speed_up"] for peer, each in results.get("pipelines", {}).items() if "speed_up" in each}
    medians = {peer: statistics.median(each) for peer, each in speeds.items()}
    for peer, value in medians.items():
        if value * CLEAR > medians.get(OURS, value):
            why = "its stages are threads, and send nothing" if peer == "torchgpipe" else "see the spread of turns"
            yield "speed-up of a pipeline", f"{peer}: {value:.2f}", f"{medians[OURS]:.2f}", why


def why_of(key: str, theirs: Results, ours: Results) -> str:
    """Return the parts in which a step costs more than a peer's, as measured."""
    ends = ("bytes",) if key == "bytes" else ("messages", "calls")
    pairs = {phase: [sum(of.get(f"{phase} {end}", 0) for end in ends) for of in (ours, theirs)] for phase in PHASES}
    parts = ", ".join(f"{phase} {mine:,} to {other:,}" for phase, (mine, other) in pairs.items() if mine or other)
    why = "gradients are summed in float64 (`docs/decisions/0003`)" if key == "bytes" else "corners are messages too"
    if key not in ("bytes", "messages"):
        return f"none in messages and calls ({parts}): ranks share the cores, and turns spread (`tables.md`); stays"
    return f"{parts}: {why}; stays"


def figures(found: Results) -> dict[str, float]:
    """Return a step's seconds over ours, messages with calls, their bytes, and MiB."""
    ends = ("messages", "calls", "bytes")
    messages, calls, size = (sum(value for key, value in found.items() if key.endswith(f" {end}")) for end in ends)
    seconds = statistics.median(found["ratio"])
    return {"seconds": seconds, "messages": messages + calls, "bytes": size, "MiB": found["MiB"]}


def pages(results: Results) -> dict[str, str]:
    """Return the pages by name."""
    times = [f"{key.partition(':')[0]} {value}" for key, value in results.items() if key.endswith(": measured")]
    absent = [part for part in PARTS if len(results.get(part, {})) < 2]
    worse = [*better(results), *((f"{part}: not measured beside others yet", "", "", "") for part in absent)]
    shares = "; ".join(
        f"{peer} {_share(results, 'layers', peer)}, {_share(results, 'networks', peer)}" for peer in STEPS
    )
    known = results.get("versions", {})
    versions = [
        (name, known.get(name) or "not here", peer.where, " ".join((peer.absent or peer.changed).split()))
        for name, peer in PEERS.items()
    ]
    readme = f"""# Side by side with other libraries

Layers, networks, maps and pipelines run by other libraries and by tiledseg on the same work, here.

```
python -m benchmarks.side_by_side    # every part; --only cost --items U-Net --peers ShardTensor: one row
```

## Where another is better
{markdown(("question", "better", "tiledseg", "measured cause, and whether it will change"), worse)}

Exact of the kinds of layers, and of the networks of others, that were run on 2 ranks in float64: {shares}. y, dx and dW
then differ from one process on the whole image by at most 1e-10 of the largest. Every row, costs, maps and pipelines:
`tables.md`. Which library for which job: `docs/choosing.md`.

## Versions, and what was changed to make each run
{markdown(("peer", "version", "from", "changed, or why not run"), versions)}

Machine: {results.get("machine", "")}. The whole: {results.get("elapsed", "")}. Day, seconds and load of each part:
{"; ".join(times)}.
"""
    return {"README.md": readme, "tables.md": "\n\n".join(_tables(results)) + "\n"}


def _share(results: Results, part: str, peer: str) -> str:
    there = [found for found in results.get(part, {}).get(peer, {}).values() if "absent" not in found]
    return f"{sum(map(is_exact, there))} of {len(there)}"


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
    ways = ("way", "seconds", "processor seconds", "over ours", "MiB", "pixels unlike the whole image's")
    lines = ", ".join(f"{who} {written(f'map, {who}')}" for who in ("tiledseg", "MONAI", "terratorch"))
    yield f"""## Maps of one scene, one thread
File to file. Processor seconds over ours, by turns. MiB above those before the map. Single unlike
pixels are rounding of float32. Lines of code: {lines}.
{markdown(ways, [(way, *_map(each)) for way, each in found.items()])}"""
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
