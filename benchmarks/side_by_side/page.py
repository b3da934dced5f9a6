"""The pages of what was measured: README.md, in which rows where a peer is better stand first, and tables.md."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import maps
from benchmarks.side_by_side.peers import PEERS
from benchmarks.side_by_side.spatial import OURS, STEPS
from benchmarks.spread import Spread, markdown

Results = dict[str, Any]
Row = Sequence[object]
PARTS = ("layers", "networks", "cost", "maps", "pipelines")
OURS_OF_WRONG = {
    "a block of the output is": "a block is said to be the whole, or has another size",
    "no gradient ": "gradients are lost without a word",
}
EXACT, CLEAR = 1e-10, 0.97  # in float64; a ratio below is a difference, not noise
WHY = {
    "seconds": "ours keeps blocks' places and sums gradients in float64; stays",
    "MiB": "halos and channels-last copies lie beside blocks; `fusion` takes less",
    "bytes": "gradients are summed in float64 (`docs/decisions/0003`), see the bytes of calls; stays",
    "messages": "corners are messages of their own, so that an exchange is one round; stays",
    "lines": "the loop cuts its block itself; stays",
    "layers": "not taken (`docs/reference/foreign-networks.md`)",
    "map: seconds": "see the rows without `verify` (once a map) and with `grid=4`; the exact halo stays",
    "crops": "the plan, a look at the module, batches that are not full; MiB do not grow with the raster",
    "map: MiB": "tiles are as large as memory allows; see the row with `grid=4`",
    "pipeline": "the balance goes by multiply-adds; `balance` takes another",
}
WRITTEN = {  # the functions that a user would write for each job, in these files
    OURS: ("spatial", "tiledseg_step"),
    "torch DTensor": ("spatial", "_sharded", "dtensor_step"),
    "torch DTensor, older rule": ("spatial", "_sharded", "dtensor_step", "older_dtensor_step"),
    "ShardTensor": ("spatial", "_sharded", "shardtensor_step"),
    "DistDL": ("distdl_layers", "Spread", "twin", "replace", "step_of"),
    "map, tiledseg": ("maps", "by_tiledseg"),
    "map, MONAI": ("maps", "by_monai"),
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
            for mine, wrong in OURS_OF_WRONG.items():
                if words.startswith(mine):
                    return f"**wrong**: {wrong}"
            return f"{word}: {words[:70]}{'...' if len(words) > 70 else ''}"
    far = max(found[key] for key in ("y", "dx", "dW"))
    worst = ", ".join(f"{key} {found[key]:.0e}" for key in ("y", "dx", "dW") if not found[key] <= EXACT)
    return f"exact, {far:.0e}" if far <= EXACT else f"**wrong**: {worst}"


def is_exact(found: Results | None) -> bool:
    return state(found).startswith("exact")


def better(results: Results) -> Iterator[Row]:
    """Give the rows in which a peer is better: question, peer and its figure, ours, why."""
    for part in ("layers", "networks"):
        for item, mine in results.get(part, {}).get(OURS, {}).items():
            others = [peer for peer, items in results[part].items() if peer != OURS and is_exact(items.get(item))]
            if others and not is_exact(mine):
                yield item, f"{', '.join(others)}: exact", state(mine), WHY["layers"]
    for peer, runs in results.get("cost", {}).items():
        for item, found in runs.items() if peer != OURS else ():
            mine = results["cost"].get(OURS, {}).get(item, {})
            if "ratio" in found and "ratio" in mine:
                theirs, own = figures(found), figures(mine) | {"seconds": 1}
                for key in (key for key, value in theirs.items() if value < CLEAR * own[key]):
                    yield f"{key} of a step: {item}", f"{peer}: {theirs[key]:,.4g}", f"{own[key]:,.4g}", WHY[key]
        if peer != OURS and any("ratio" in found for found in runs.values()) and written(peer) < written(OURS):
            yield "lines of a step", f"{peer}: {written(peer)}", written(OURS), WHY["lines"]
    found = results.get("maps", {})
    for way, each in found.items():
        mine = found.get(maps.CROPS if "crops" in way else maps.OURS, {})
        if way.startswith("MONAI") and "ratio" in each and "MiB" in mine:
            if (ratio := statistics.median(each["ratio"])) < CLEAR:
                yield (
                    "processor seconds of a map",
                    f"{way}: {ratio:.2f}",
                    "1",
                    WHY["crops" if "crops" in way else "map: seconds"],
                )
            if each["MiB"] < CLEAR * mine["MiB"]:
                yield (
                    "MiB of a map",
                    f"{way}: {each['MiB']:.0f}",
                    f"{mine['MiB']:.0f}",
                    WHY["crops" if "crops" in way else "map: MiB"],
                )
    pipes = results.get("pipelines", {})
    speeds = {peer: statistics.median(each["speed_up"]) for peer, each in pipes.items() if "speed_up" in each}
    for peer, value in speeds.items():
        if peer != OURS and value > speeds.get(OURS, value) / CLEAR:
            yield "speed-up of a pipeline", f"{peer}: {value:.2f}", f"{speeds[OURS]:.2f}", WHY["pipeline"]


def figures(found: Results) -> dict[str, float]:
    """Return a step's seconds over ours, messages and calls, bytes of both, and MiB."""
    counts = {key: found.get(key, 0) for key in ("messages", "calls", "message bytes", "call bytes")}
    both = {"messages": counts["messages"] + counts["calls"], "bytes": counts["message bytes"] + counts["call bytes"]}
    return {"seconds": statistics.median(found["ratio"]), **both, "MiB": found["MiB"]}


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
    head = ("peer", "version", "from", "changed, or why not run")
    readme = f"""# Side by side with other libraries

Layers, networks, maps and pipelines run by other libraries and by tiledseg on the same work, here.

```
python -m benchmarks.side_by_side                     # every part; --only maps: one of them
python -m benchmarks.side_by_side --only cost --items U-Net --peers ShardTensor tiledseg
```

## Where another is better
{markdown(("question", "better", "tiledseg", "why, and whether it will change"), worse)}

## Exact, of those that were run
{markdown(("2 ranks, float64", "kinds of layers", "networks of others"), counts)}

Exact: y, dx and dW differ from one process on the whole image by at most 1e-10 of the largest. Every row, costs, maps
and pipelines: `tables.md`. Which library for which job: `docs/choosing.md`.

## Versions, and what was changed to make each run
{markdown(head, versions)}

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
    cost = ("network, ranks", "who", "messages, MB", "calls, MB", "MiB a rank", "seconds", "over ours", "CPU over ours")
    yield f"""## Cost of a training step, 384 x 384 px, float32
Messages and collective calls of all ranks, each with the bytes that ranks hand over: operations of torch.distributed,
for DistDL those of mpi4py. Seconds, and processor seconds of all ranks, over those of tiledseg by turns in the same
processes and over the same transport (Gloo, for DistDL MPI). MiB: growth of the larger rank in its first step. Lines of
code for the step, given a module: {", ".join(f"{peer} {written(peer)}" for peer in STEPS)}.
{markdown(cost, [_cost(item, peer, found) for item, peer, found in _by_item(results.get("cost", {}))])}"""
    found = {way: each for way, each in results.get("maps", {}).items() if isinstance(each, dict)}
    head = ("way", "seconds", "processor seconds", "over ours", "MiB", "pixels unlike the whole image's")
    yield f"""## Maps of one scene, one thread
File to file. Processor seconds over ours, by turns. MiB above those before the map. Single unlike
pixels are rounding of float32. Lines of code: tiledseg {written("map, tiledseg")}, MONAI {written("map, MONAI")}.
{markdown(head, [(way, *_map(each)) for way, each in found.items()])}"""
    rows = [(peer, *_pipe(each), written(f"pipeline, {peer}")) for peer, each in results.get("pipelines", {}).items()]
    yield f"""## Pipelines of 2 stages
A U-Net, 8 micro-batches of 192 px, float32. Seconds of one process over those of the pipeline, by turns. torchgpipe's
stages are threads of one process, and send nothing.
{markdown(("who", "speed-up", "bytes", "gradients differ by", "lines of code"), rows)}"""


def _by_item(cost: Results) -> list[tuple[str, str, Results]]:
    items = dict.fromkeys(item for runs in cost.values() for item in runs)
    return [(item, peer, runs[item]) for item in items for peer, runs in cost.items() if item in runs]


def _cost(item: str, peer: str, found: Results) -> Row:
    if "ratio" not in found:
        return item, peer, state(found), "", "", "", "", ""
    counts = (f"{found.get(f'{kind}s', 0)}, {found.get(f'{kind} bytes', 0) / 1e6:.3f}" for kind in ("message", "call"))
    over = [Spread.of(found[key]) if peer != OURS else 1 for key in ("ratio", "cpu")]
    return item, peer, *counts, found["MiB"], found["seconds"], *over


def _map(each: Results) -> Row:
    if "seconds" not in each:
        return "", "", "", "", state(each)
    wrong = "" if each["wrong"] is None else f"{each['wrong']:,} of {each['pixels']:,}"
    return f"{each['seconds']:.1f}", f"{each['cpu']:.1f}", Spread.of(each.get("ratio", [1])), round(each["MiB"]), wrong


def _pipe(each: Results) -> Row:
    if "speed_up" not in each:
        return state(each), "", ""
    return Spread.of(each["speed_up"]), f"{each['bytes']:,}", f"{each['far']:.0e}"
