"""The pages of what was measured: README.md, in which rows where a peer is better stand first, and tables.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.side_by_side import maps
from benchmarks.side_by_side.peers import PEERS
from benchmarks.side_by_side.spatial import OURS, STEPS
from benchmarks.spread import Spread, markdown

Results = dict[str, Any]
OURS_OF_WRONG = {
    "a block of the output is": "a block is said to be the whole, or has another size",
    "no gradient ": "gradients are lost without a word",
}
EXACT, CLEAR = 1e-10, 0.97  # in float64; a ratio below is a difference, not noise
KEPT = "gradients are summed in float64 (decision 0003); stays"
WHY = {
    "seconds of a step": "small networks pay for float64 sums and the bookkeeping of blocks; stays",
    "memory of a step": "copies in channels-last order and halos beside the blocks; smaller `fusion` takes less",
    "bytes of a step": KEPT,
    "messages of a step": "corners are messages of their own, so that an exchange is one round; stays",
    "lines to write": "the loop cuts its block itself; stays",
    "capability": "not taken yet (`docs/reference/foreign-networks.md`)",
    "seconds of a map": "a first call compares the traced graph with the module (`verify`), and tiles overlap by the "
    "exact halo; the first is once a map, whatever its size, the second stays",
    "memory of a map": "large tiles, and the comparison of the traced graph with the module; a finer `grid` takes less",
    "speed-up of a pipeline": "the balance goes by multiply-adds; `balance` takes another",
}


def state(found: Results | None) -> str:
    """Return the cell of an item: exact to what, approximate by how much, an error's words, or a refusal's."""
    if found is None:
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


def better(results: Results) -> Iterator[tuple[str, str, str, str]]:
    """Give the rows in which a peer is better: question, peer and its figure, ours, why."""
    for part in ("layers", "networks"):
        ours = results.get(part, {}).get(OURS, {})
        for item, found in ours.items():
            others = [peer for peer, items in results[part].items() if peer != OURS and is_exact(items.get(item))]
            if others and not is_exact(found):
                yield item, f"{', '.join(others)}: exact", state(found), WHY["capability"]
    cost = results.get("cost", {})
    for peer, runs in cost.items():
        for ranks, items in ((key, value) for key, value in runs.items() if key != "lines" and peer != OURS):
            for item, found in items.items():
                mine = cost.get(OURS, {}).get(ranks, {}).get(item, {})
                if "ratio" in found and "MiB" in mine:
                    where = f"{item}, {ranks} ranks"
                    ratio = statistics.median(found["ratio"])
                    if ratio < CLEAR:
                        yield (
                            f"seconds of a step: {where}",
                            f"{peer}: {ratio:.2f} of ours",
                            "1",
                            WHY["seconds of a step"],
                        )
                    for key, word, unit in (
                        ("MiB", "memory", " MiB"),
                        ("bytes", "bytes", ""),
                        ("messages", "messages", ""),
                    ):
                        if key in found and found[key] + found.get("calls", 0) * (key == "messages") < CLEAR * (
                            mine[key] + mine.get("calls", 0) * (key == "messages")
                        ):
                            values = f"{peer}: {found[key]:,}{unit}", f"{mine[key]:,}{unit}"
                            yield f"{word} of a step: {where}", *values, WHY[f"{word} of a step"]
        if runs.get("lines", 999) < cost.get(OURS, {}).get("lines", 0):
            yield "lines to write", f"{peer}: {runs['lines']}", str(cost[OURS]["lines"]), WHY["lines to write"]
    found = results.get("maps", {})
    for way, each in found.items():
        mine = found.get(maps.CROPS if "crops" in way else maps.EXACT, {})
        if way.startswith("MONAI") and "ratio" in each and "MiB" in mine:
            if (ratio := statistics.median(each["ratio"])) < CLEAR:
                yield "seconds of a map", f"{way}: {ratio:.2f} of ours", "1", WHY["seconds of a map"]
            if each["MiB"] < CLEAR * mine["MiB"]:
                yield (
                    "memory of a map",
                    f"{way}: {each['MiB']:.0f} MiB",
                    f"{mine['MiB']:.0f} MiB",
                    WHY["memory of a map"],
                )
    pipes = {
        peer: statistics.median(each["speed_up"])
        for peer, each in results.get("pipelines", {}).items()
        if "speed_up" in each
    }
    for peer, value in pipes.items():
        if peer != OURS and value > pipes.get(OURS, value) / CLEAR:
            yield "speed-up of a pipeline", f"{peer}: {value:.2f}", f"{pipes[OURS]:.2f}", WHY["speed-up of a pipeline"]


def pages(results: Results) -> dict[str, str]:
    """Return the pages by name."""
    times = [f"{key.partition(':')[0]} {value}" for key, value in results.items() if key.endswith(": measured")]
    absent = [part for part in ("layers", "networks", "cost", "maps", "pipelines") if len(results.get(part, {})) < 2]
    worse = list(better(results)) + [(f"{part}: not measured beside others yet", "", "", "") for part in absent]
    counts = [(peer, *(_count(results, part, peer) for part in ("layers", "networks"))) for peer in STEPS]
    versions = [
        (peer.name, results.get("versions", {}).get(name) or "not here", peer.where, peer.absent or peer.changed)
        for name, peer in PEERS.items()
    ]
    head = ("peer", "version", "from", "changed, or why not run")
    readme = f"""# Side by side with other libraries

Layers, networks, maps and pipelines run by other libraries and by tiledseg on the same work, here.

```
python -m benchmarks.side_by_side                 # all parts, 40 minutes at most; --only maps: one of them
```

## Where another is better
{markdown(("question", "better", "tiledseg", "why, and whether it will change"), worse)}

## Exact, of those that were run
{markdown(("2 ranks over Gloo, float64", "kinds of layers", "networks of others"), counts)}

Exact: y, dx and dW differ from one process on the whole image by at most 1e-10. Every row, costs, maps and pipelines:
`tables.md`. Which library for which job: `docs/choosing.md`.

## Versions, and what was changed to make each run
{markdown(head, versions)}

Machine: {results.get("machine", "")}, others at work. Part, day, seconds, load: {"; ".join(times)}.
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
    cost = ("network, ranks", "who", "messages, calls", "bytes", "MiB a rank", "seconds", "over ours", "CPU over ours")
    yield f"""## Cost of a training step, 512 x 512 px, float32
Messages, collective calls and bytes of all ranks. Seconds over ours by turns in one process, and processor seconds of
all ranks, which others at work disturb less. MiB: growth of the larger rank in its first step.
{markdown((*cost, "lines to write"), list(_costs(results)))}"""
    found = {way: each for way, each in results.get("maps", {}).items() if isinstance(each, dict)}
    head = ("way", "seconds", "processor seconds", "over ours", "MiB", "pixels unlike the whole image's")
    yield f"""## Maps of one scene, one thread
Processor seconds over ours, by turns. MiB above those before the map. Single unlike pixels are rounding of float32.
{markdown(head, [(way, *_map(each)) for way, each in found.items()])}"""
    rows = [(peer, *_pipe(each)) for peer, each in results.get("pipelines", {}).items()]
    yield f"""## Pipelines of 2 stages
A U-Net, 8 micro-batches of 192 px, float32. Seconds of one process over those of the pipeline, by turns.
{markdown(("who", "speed-up", "bytes", "gradients differ by"), rows)}"""


def _costs(results: Results) -> Iterator[Sequence[object]]:
    for ranks in ("2", "4"):
        for item in ("chain of convolutions", "U-Net"):
            for peer, runs in results.get("cost", {}).items():
                found = runs.get(ranks, {}).get(item)
                if found is None or "ratio" not in found:
                    yield f"{item}, {ranks}", peer, state(found), "", "", "", "", "", ""
                    continue
                counts = (f"{found['messages']}, {found['calls']}", f"{found['bytes']:,}")
                over = [Spread.of(found[key]) if peer != OURS else 1 for key in ("ratio", "cpu")]
                sent, handed = ("over MPI: not counted", "") if peer == "DistDL" else counts
                yield f"{item}, {ranks}", peer, sent, handed, found["MiB"], found["seconds"], *over, runs["lines"]


def _map(each: Results) -> Sequence[object]:
    if "seconds" not in each:
        return ("", "", "", "", state(each))
    wrong = "" if each["wrong"] is None else f"{each['wrong']:,} of {each['pixels']:,}"
    return f"{each['seconds']:.1f}", f"{each['cpu']:.1f}", Spread.of(each.get("ratio", [1])), round(each["MiB"]), wrong


def _pipe(each: Results) -> Sequence[object]:
    if "speed_up" not in each:
        return (state(each), "", "")
    return Spread.of(each["speed_up"]), f"{each['bytes']:,}", f"{each['far']:.0e}"
