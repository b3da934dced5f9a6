"""What people read: the first lines of `tiledseg plan`, and the answer of a search."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tiledseg.plan import main
from tiledseg.user_files.machine import find_machine

SMALL = "--size 2000 --levels 4 --base-channels 16"
SEARCH = "--search --size 900 --levels 3 --base-channels 8 --gpus 4 --images 6 --images-per-step 2 --machine summit"
PLANS = [
    "--machine h100",
    f"{SMALL} --grid 4 --gpus 64 --images 30 --machine summit",
    f"{SMALL} --grid 4 --gpus 5 --norm batch",
    f"{SMALL} --grid 2 --gpu-memory 600MiB",
    f"{SMALL} --grid 1 --norm instance --gpu-memory 1GiB",
    f"{SMALL} --grid 1 --stages 4 --machine summit",
    f"{SMALL} --grid 4 --gpu-memory 10MiB",
    "--size 16 --grid 1 --norm batch",
]


def printed(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(line.split()) == 0
    return capsys.readouterr().out


def summary(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    return json.loads(printed(capsys, f"{line} --format json"))["summary"]


@pytest.mark.parametrize("line", PLANS)
def test_the_first_lines_are_few_and_short(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    every = printed(capsys, line).splitlines()
    assert max(map(len, every)) <= 80
    lines = every[: next(at for at, text in enumerate(every) if text.startswith("more")) + 2]
    assert len(lines) <= 25
    labels = [each.split("  ")[0] for each in lines if each and not each.startswith(" ")]
    assert {"memory", "grid", "more"} <= set(labels)
    part = summary(capsys, line)
    if part["modes"]:
        assert {"halo mode", "GPUs", "step", "epoch"} <= set(labels)


@pytest.mark.parametrize("line", [*PLANS[:2], PLANS[3]])
def test_what_would_be_better_is(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A narrower precision or a finer grid, planned by itself, has the figures that were promised."""
    part = summary(capsys, line)
    assert part["better"]
    for other in part["better"]:
        kept = re.sub(r"--grid \d+", "", line)
        grid = "" if "--grid" in other["flags"] else f"--grid {part['grid'][0]} {part['grid'][1]}"
        own = summary(capsys, f"{kept} {grid} {other['flags']}")
        assert (own["memory"], own["gpus"]) == (other["memory"], other["gpus"])
        assert own["epoch_seconds"] == pytest.approx(other["epoch_seconds"])
        assert own["fits"] is not False
        assert part["fits"] is False or own["epoch_seconds"] < part["epoch_seconds"]


def test_gpus_take_images_and_tiles(capsys: pytest.CaptureFixture[str]) -> None:
    """More GPUs than tiles take several images, fewer take several tiles each."""
    one, many, few = (summary(capsys, f"{SMALL} --grid 4 --images 30 --gpus {gpus}") for gpus in (16, 64, 5))
    assert (one["images_per_step"], many["images_per_step"], few["images_per_step"]) == (1, 4, 1)
    assert (one["gpus"], many["gpus"], few["gpus"]) == (16, 64, 4), "of 5, in mode layer on 2 x 2"
    ours = summary(capsys, f"{SMALL} --grid 4 --images 30 --gpus 64 --images-per-step 2")
    assert (ours["images_per_step"], ours["gpus"]) == (2, 32)
    assert many["epoch_seconds"] == pytest.approx(8 / 1000 * many["milliseconds"])
    assert many["epoch_seconds"] < one["epoch_seconds"] < few["epoch_seconds"]


def test_recomputed_layers_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    roomy, tight = (summary(capsys, f"{SMALL} --grid 2 --gpu-memory {memory}") for memory in ("16GiB", "600MiB"))
    assert roomy["recomputed"] == 0 < tight["recomputed"]
    assert tight["memory"] <= 600 * 2**20 < roomy["memory"]


def test_where_no_grid_fits_nothing_is_proposed_and_the_remedy_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{SMALL} --grid 4 --gpu-memory 10MiB"
    part = summary(capsys, line)
    assert (part["fits"], part["better"]) == (False, [])
    assert "does NOT fit; no grid does; use a smaller network" in " ".join(printed(capsys, line).split())


def test_an_epoch_is_without_reading_where_reading_has_time(capsys: pytest.CaptureFixture[str]) -> None:
    for machine, without in (("h100", True), ("cpu", False)):
        rows = printed(capsys, f"{SMALL} --grid 4 --gpus 16 --machine {machine}").splitlines()
        (epoch,) = (row for row in rows if row.startswith("epoch"))
        assert ("if all GPUs together read" in epoch) == without


def test_table_json_and_batch_script_have_one_winner(capsys: pytest.CaptureFixture[str]) -> None:
    table = printed(capsys, SEARCH)
    part = json.loads(printed(capsys, f"{SEARCH} --format json"))["search"]
    script = printed(capsys, f"{SEARCH} --emit slurm")
    best = part["best"][0]
    assert f"    {best['settings']}: chosen\n" in table
    assert max(map(len, table.splitlines())) <= 80
    assert best["epoch_seconds"] == pytest.approx(3 * best["milliseconds"] / 1000, rel=1e-3)
    assert [each["milliseconds"] for each in part["best"]] == sorted(each["milliseconds"] for each in part["best"])
    assert sum(best["by_term"].values()) == pytest.approx(best["milliseconds"], rel=1e-3)
    assert f"--tiling.grid '[{best['grid'][0]},{best['grid'][1]}]'" in script
    assert "--train.images_per_step 2" in script
    assert f"--parallel.halo {best['settings'].split(',')[0]}\n" in script
    for key, value in best["parallel"].items():
        word = "'[" + ",".join(map(str, value)) + "]'" if isinstance(value, list) else value
        assert f"--parallel.{key} {word}" in script
    assert part["reason"].split(":")[0].replace("\n", " ") in " ".join(table.split())


def test_a_search_names_the_narrower_precision_and_idle_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    table = " ".join(printed(capsys, SEARCH).split())
    assert "precision: --precision fp16 takes less time; fp32 without TF32 (train's default) settings: " in table
    assert re.search(r"epoch of the first row: [\d.]+ m?s for 6 images in 3 steps, if all GPUs together read ", table)
    assert re.search(r" memory 1 [\d.]{1,3} ms [\d.]{1,3} ms ", table), "two digits, of what is not measured"
    assert "waits" not in table, "no row has stages"
    assert "--precision fp16 takes" not in printed(capsys, f"{SEARCH} --precision fp16")
    assert main([*SEARCH.replace("--images 6", "--images 7").split(), "--gpu-memory", "45GiB"]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: --gpu-memory is 45GiB, but V100 on Summit has 16 GiB\n"
    assert "; an epoch's last step has 1 of 2 images, and idle GPUs" in " ".join(out.split())


def test_blocks_on_the_nodes_disk_are_keys_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    """A norm over an image that does not fit: by the datasheet's disk, in the table, in JSON, in the script."""
    line = f"{SEARCH} --norm instance --size 1500 --gpu-memory 100MiB --gpus 1 --grid 1"
    best = json.loads(printed(capsys, f"{line} --format json"))["search"]["best"][0]
    rows, cols = best["memory_keys"]["blocks"]
    assert best["settings"] == "read, in blocks, grid 1 x 1"
    assert best["memory"] <= 100 * 2**20
    assert best["by_term"]["again"] > 0
    assert "chosen, a store" in " ".join(printed(capsys, line).split())
    script = printed(capsys, f"{line} --emit slurm")
    assert f"--memory.blocks '[{rows},{cols}]'" in script
    assert '--memory.store "$local"' in script


def test_tensors_that_leave_for_the_host_are_keys_of_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Show offload where the way there is quick: in the table, in JSON, in the script."""
    shipped = Path(find_machine.__code__.co_filename).parent / "machines/h100.yaml"
    profile = yaml.safe_load(shipped.read_text())
    profile["figures"]["stores"]["host"] = {"written": 1e15, "read": 1e15}
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(profile))
    line = "--search --size 600 --grid 1 --levels 3 --base-channels 8 --norm instance --gpus 1 --gpu-memory 120MiB"
    line += f" --machine {tmp_path / 'quick.yaml'}"
    best = json.loads(printed(capsys, f"{line} --format json"))["search"]["best"][0]
    assert best["memory_keys"] == {"offload": "auto", "store": "host"}
    words = f"memory.offload auto, memory.store host for {best['away'] / 2**20:.2f} MiB"
    assert f"chosen, recomputing, {words}" in " ".join(printed(capsys, line).split())
    script = printed(capsys, f"{line} --emit slurm")
    assert "--memory.offload auto --memory.store host" in " ".join(script.replace("\\\n", " ").split())
    assert '"$local"' not in script


@pytest.mark.parametrize(("gpus", "images"), [(30, 6), (18, 4)])  # GPUs hold 4 tiles an image
def test_a_search_proposes_images_of_a_step_that_share_the_gpus_evenly(
    gpus: int, images: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = SEARCH.replace("--gpus 4 --images 6 --images-per-step 2", f"--gpus {gpus} --images 12 --gpu-memory 90MiB")
    table = " ".join(printed(capsys, line).split())
    assert f"{images} a step (as many as the GPUs take; --images-per-step sets it)" in table
    assert ("30 at work, on 5 nodes of 6" in table) == (gpus == 30)
