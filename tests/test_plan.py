"""The command as users type it: its figures, what people read first, and the answer of a search."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.answers import output_of, refuse
from tiledseg.plan import main
from tiledseg.user_files.machine import find_machine

TWO, SMALL = "--size 1000 --grid 2", "--size 2000 --levels 4 --base-channels 16"
SCALING = "--size 600 --scaling 1:2 --machine summit"
SEARCH = "--search --size 900 --levels 3 --base-channels 8 --gpus 4 --images 6 --images-per-step 2 --machine summit"
JOB = "--size 10000 --grid 8"
GOLDEN = "--size 10000 --grid 8 --levels 5 --convs-per-level 2 --kernel 3 --format json"


def printed(line: str) -> str:
    return output_of(lambda: main(line.split()))


def answer(line: str) -> dict:
    return json.loads(printed(f"{line} --format json"))


def summary(line: str) -> dict:
    return answer(line)["summary"]


def test_a_login_node_answers_at_once_without_torch_numpy_or_mpi() -> None:
    script = (
        f"import sys; from tiledseg.plan import main; code = main({GOLDEN.split()!r}); "
        "heavy = {'torch', 'numpy', 'mpi4py', 'rasterio', 'h5py', 'matplotlib'} & set(sys.modules); "
        "print(sorted(heavy), file=sys.stderr); sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.stderr.strip() == "[]"
    found = json.loads(done.stdout)
    paper = {"shrink": 2, "halo": 92, "tile": 1250, "context": 1434, "efficiency": 1.3161, "efficiency_linear": 1.2944}
    exact = {"alignment": 16, "halo_minimum": 94, "halo": 96, "grid": [8, 8], "core_max": [1264, 1264], "tiles": 64}
    exact |= {"context_max": [1440, 1440], "efficiency": 1.2869}
    assert found["paper"] == paper
    assert found["exact"] | exact == found["exact"]
    assert (found["cluster"]["gpus_per_image"], found["cluster"]["nodes_per_image"]) == (64, 10.67)
    assert seconds < 4, "of the processor's time; 0.45 s where this was written"


def test_every_flag_changes_its_figure() -> None:
    plain = answer("--size 2000 --grid 4")
    expected = {
        "--levels 4": ("exact", "alignment", 8),
        "--size 1000 3000 --grid 2 5": ("exact", "grid", [2, 5]),
        "--convs-per-level 1": ("paper", "halo", 46),
        "--kernel 5": ("paper", "halo", 184),
        "--padding valid": ("exact", "border", "mirrored"),
        "--upsampling bilinear": ("exact", "halo_minimum", 110),
        "--base-channels 8": ("network", "parameters", 485898),
        "--bands 3": ("network", "parameters", 31031810),
        "--classes 5": ("network", "parameters", 31032581),
        "--norm batch": ("network", "parameters", 31038274),
        "--precision fp64": ("memory", "precision", "fp64"),
        "--gpu-memory 1MiB": ("memory", "fits", False),
        "--gpus-per-node 4": ("cluster", "nodes_per_image", 4.0),
        "--images 3": ("cluster", "tiles", 48),
        "--gpus 5": ("cluster", "rounds", 4),
        "--gpus 7": ("cluster", "idle_gpus_last_round", 5),
        "--gpus 12": ("cluster", "utilisation", 0.6667),
        "--model small": ("network", "layers", 109),
        "--stride 2": ("paper", "shrink", 1000.5),
        "--mesh 2": ("modes", "ranks", 4),
    }
    for flags, (part, key, value) in expected.items():
        found = answer(f"--size 2000 --grid 4 {flags}")
        assert found[part][key] == value, flags
        assert plain[part].get(key) != value, flags


def test_another_stride_has_the_formula_only() -> None:
    found = answer("--size 1000 --grid 4 --stride 2")
    assert found.keys() == {"paper", "omitted", "cluster"}
    assert "nothing is exact for stride 2" in found["omitted"]["reason"]
    text = printed("--size 1000 --grid 4 --stride 2")
    assert re.findall(r"^(\w+ ?\w*): ", text, re.MULTILINE) == ["cluster", "paper", "left out"]


def test_the_work_of_an_image_grows_as_the_pixels_of_its_contexts_do() -> None:
    cut, whole = (answer(f"--size 500 700 --levels 4 --base-channels 4 --grid {grid}") for grid in ("3 2", "1"))
    network, single = cut["network"], whole["network"]
    assert network["multiply_adds_context"] == sum(layer["multiply_adds"] for layer in network["by_layer"])
    assert network["parameters"] == single["parameters"] == sum(layer["parameters"] for layer in network["by_layer"])
    factor = cut["exact"]["efficiency"] / whole["exact"]["efficiency"]
    assert network["multiply_adds_image"] == pytest.approx(factor * single["multiply_adds_image"], rel=1e-4)


def slow_links(folder: Path) -> str:
    """Return the flag of a machine whose messages take 0.1 s."""
    figures = {"flops": {"fp32": 1e13}, "memory_bandwidth": 1e24, "launch": 0}
    figures |= {"links": {"host": {"latency": 0.1, "bandwidth": 1e10}}}
    (folder / "slow.yaml").write_text(json.dumps({"name": "slow", "host": {"ranks": 64}, "figures": figures}))
    return f"--machine {folder / 'slow.yaml'}"


def test_memory_norms_and_small_grids(tmp_path: Path) -> None:
    slow = answer(f"--size 2000 --grid 4 {slow_links(tmp_path)}")["modes"]
    assert (slow["choice"]["mode"], slow["choice"]["fusion"], slow["mesh"]) == ("read", None, [4, 4])
    assert slow["gradient_all_reduce"]["bytes"] == 8 * 31_032_386
    papers = answer("--size 10000 --grid 8")["modes"]
    read, exchange, layer = papers["costs"]
    assert [row["messages_rank"] for row in papers["costs"]] == [0, 8, 36 * 8 - 8]
    assert exchange["bytes_rank"] == 8_257_536
    assert exchange["pixels_read"] == layer["pixels_read"] == 10_000**2 < read["pixels_read"]
    assert layer["multiply_adds"] == papers["multiply_adds_undivided"] < read["multiply_adds"]
    tight = answer("--size 2000 --grid 4 --mesh 1 --gpu-memory 4GiB")["modes"]
    assert [row["fits"] for row in tight["costs"]] == [True, True, False]
    assert tight["choice"]["mode"] == "read"
    norm = answer(f"--size 1000 --grid 2 --norm batch {slow_links(tmp_path)}")["modes"]
    assert norm["choice"]["mode"] == "layer"
    assert [row["exact"] for row in norm["costs"]] == [False, False, True]
    one = answer("--size 1000 --grid 1 --norm batch")["modes"]
    assert {row["milliseconds"] for row in one["costs"]} == {one["costs"][0]["milliseconds"]}


def test_a_mesh_that_layer_mode_cannot_have_is_said_so() -> None:
    flags = "--size 33 --grid 3 --padding valid"
    row = answer(flags)["modes"]["costs"][-1]
    assert (row["mode"], row["possible"]) == ("layer", False)
    assert "own" in row["reason"]
    assert "layer: not possible" in printed(f"{flags} --show modes")


@pytest.mark.parametrize("given", ["--size 3000 --grid 1 --gpu-memory 1GiB", "--size 10000 --grid 2 --gpu-memory 3GiB"])
def test_a_refusal_names_a_grid_that_does(capsys: pytest.CaptureFixture[str], given: str) -> None:
    """Of tiles that are too large for the memory, and for a kernel."""
    main([*given.split(), "--show", "memory"])
    said = capsys.readouterr()
    grids = set(re.findall(r"use --grid (\d+ \d+)|: \[(\d+,\d+)\] does", said.out + said.err))
    assert len(grids) == 1
    found = answer(re.sub(r"--grid \d+", f"--grid {''.join(grids.pop()).replace(',', ' ')}", given))
    assert found["memory"]["fits"]
    assert found["modes"]["choice"]["mode"] is not None


def test_table_shows_the_same_figures() -> None:
    flags = "--size 10000 --grid 8 --gpu-memory 3GiB --images 100 --gpus 1200"
    plain, some, text = (printed(f"{flags}{show}") for show in ("", " --show memory,modes", " --show all"))
    assert some.startswith(plain.rstrip("\n"))
    assert text.startswith(plain.rstrip("\n"))
    assert re.findall(r"^(\w+): ", some, re.MULTILINE) == ["memory", "modes"]
    assert re.findall(r"^(\w+): ", text, re.MULTILINE) == ["network", "memory", "modes", "cluster", "exact", "paper"]
    for words in ("92", "1250", "1434", "1.3161", "1.2944", "94", "1264 x 1264", "1440 x 1440", "1.2869", "10.67",
                  "31,032,386", "88.9", "does NOT fit", "46.57 MiB", "759.8 ms", "in mode read",
                  "no mode fits"):  # fmt: skip
        assert words in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--size 0", ["--size is 0", "at least 1"]),
        ("--size 100 --grid 200", ["200 tiles", "100 rows", "alignment of 16", "at most 7"]),
        ("--size 100 --grid few", ["--grid is 'few'", "auto"]),
        ("--size 100 --grid auto", ["--grid is auto", "--gpu-memory"]),
        ("--size 100 --grid auto --gpu-memory 1MiB", ["needs", "1.00 MiB"]),
        ("--size 100 --grid auto --gpu-memory 1GiB --stride 2", ["--grid is auto", "--stride 2"]),
        ("--size 1000 --kernel 4", ["kernel is 4", "odd"]),
        ("--size 1000 --padding reflect", ["--padding", "reflect", "same"]),
        ("--size 1000 --model huge", ["--model", "huge", "medium-2"]),
        ("--size 1000 --model small --levels 5", ["--levels is 5", "small has 6"]),
        ("--size 1000 --gpu-memory lots", ["'lots'", "16GiB"]),
        ("--size 1000 --memory-budget 0GiB", ["--memory-budget is 0"]),
        ("--size 1000 --grid 2 --plot out.pdf", ["out.pdf", ".png"]),
        ("--size 1000 --grid 2 --plot missing/out.png", ["missing/out.png", "is not a folder"]),
        ("--size 1000 --grid 2 --mesh 3", ["--mesh is 3 x 3", "2 x 2 tiles"]),
        ("--size 1000 --grid 2 --mesh 1 2 3", ["--mesh has 3 values"]),
        (f"{TWO} --stages 0", ["--stages is 0", "at least 1"]),
        (f"{TWO} --levels 1 --stages 10", ["10 stages", "9 layers", "fewer stages"]),
        (f"{TWO} --stages 2 --balance [40,40]", ["[40,40]", "sums to 80", "has 89", "auto"]),
        (f"{TWO} --stages 2 --balance [89,0]", ["--balance is [89, 0]", "layers a stage as"]),
        (f"{TWO} --stages 3 --balance [40,49]", ["--balance has 2 parts", "--stages is 3", "3 counts"]),
        (f"{TWO} --stages 2 --balance [10,78,1] --schedule folded", ["encoder0.stash from stage 0 to 1", "auto"]),
        (f"{TWO} --balance [40,49]", ["--balance is [40,49]", "--stages"]),
        (f"{TWO} --recompute all --memory-budget 1GiB", ["--recompute is all", "--memory-budget"]),
        (f"{TWO} --stages 2 --recompute often", ["--recompute is 'often'", "except_last"]),
        (f"{TWO} --recompute always", ["--recompute is always", "--stages"]),
        (f"{TWO} --stages 2 --gpu-memory 100MiB", ["stage 0 needs at least", "is 100.00 MiB", "more stages"]),
        (
            f"{SMALL} --grid 4 --show few",
            ["--show names 'few', but this plan has network,memory,modes,cluster,exact,paper; give some"],
        ),
        (f"{SMALL} --grid 4 --show modes --format json", ["--show is modes, but only the plan's table has sections"]),
        ("--search --size 900 --gpus 4", ["--search ranks by predicted time, but no machine is known; give --machine"]),
        (f"{SCALING} --gpus 4", ["--gpus is 4, but --scaling has its own GPUs"]),
        (f"{SCALING} --plot a.png", ["--plot is a.png, but --scaling finds settings"]),
        ("--size 600 --window 60", ["--window is 60, but --build is not given"]),
        (f"{SEARCH} --mesh 2", ["--mesh is 2, but --search finds settings; leave one of them out"]),
        (f"{SEARCH} --recompute all", ["--recompute is all, but --search finds settings; leave one of them out"]),
        (f"{SEARCH} --stride 2", ["--search is given, but networks of --stride 2"]),
        (f"{SEARCH} --images 1", ["--images-per-step is 2, but --images is 1; give at most so many"]),
        ("--calibrate out.yaml --size 100", ["--size is 100, but --calibrate measures this machine"]),
        ("--size 900 --store .", ["--store is ., but --calibrate is not given; leave it out"]),
        (f"{SEARCH} --gpu-memory 50KiB --grid 4", ["settings for 4 ranks of 50.00 KiB can be"]),
        (f"{JOB} --site summit", ["--site is summit, but --emit is not given"]),
        (f"{JOB} --emit slurm --site perlmutter --machine a100", ["nodes of perlmutter have 4 GPUs; give"]),
        (f"{JOB} --machine a100 --gpus-per-node 9", ["nodes of --machine a100 have 8 GPUs; give at most 8"]),
        (f"{JOB} --emit slurm --site summit", ["--site is 'summit', but --emit slurm knows generic, frontier, perl"]),
        (f"{JOB} --emit slurm --time 2h", ["--time is '2h'; give hours and minutes"]),
        (f"{JOB} --emit lsf --gpus 100 --halo layer", ["groups of 64 ranks on full nodes of 6 take 192"]),
        (f"{JOB} --emit slurm --stages 2 --halo layer", ["--halo is layer, but the plan of --stages"]),
        (f"{JOB} --emit slurm --gpu-memory 1MiB", ["--emit needs a halo mode that fits"]),
        (f"{JOB} --emit slurm --norm batch --halo read", ["--halo is read, which is not exact here"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    line: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refuse(lambda: main(line.split()), *words)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_says_the_memory_and_the_gpus_of_a_node() -> None:
    """Those that are given win."""
    line = "--size 20000 --grid auto --machine h200"
    by_machine = answer(line)
    assert by_machine == answer(f"{line} --gpu-memory 141GiB --gpus-per-node 8")
    assert (by_machine["memory"]["gpu"], by_machine["cluster"]["gpus_per_node"]) == (141 * 2**30, 8)
    given = answer(f"{line} --gpu-memory 16GiB --gpus-per-node 4")
    assert (given["memory"]["gpu"], given["cluster"]["gpus_per_node"]) == (16 * 2**30, 4)
    assert given["exact"]["tiles"] > by_machine["exact"]["tiles"]
    assert "nodes of 8" in printed(line)


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


@pytest.mark.parametrize("line", PLANS)
def test_the_first_lines_are_few_and_short(line: str) -> None:
    every = printed(line).splitlines()
    assert max(map(len, every)) <= 80
    lines = every[: next(at for at, text in enumerate(every) if text.startswith("more")) + 2]
    assert len(lines) <= 25
    labels = [each.split("  ")[0] for each in lines if each and not each.startswith(" ")]
    assert {"memory", "grid", "more"} <= set(labels)
    part = summary(line)
    if part["modes"]:
        assert {"halo mode", "GPUs", "step", "epoch"} <= set(labels)


@pytest.mark.parametrize("line", [*PLANS[:2], PLANS[3]])
def test_what_would_be_better_is(line: str) -> None:
    """A narrower precision or a finer grid, planned by itself, has the figures that were promised."""
    part = summary(line)
    assert part["better"]
    for other in part["better"]:
        kept = re.sub(r"--grid \d+", "", line)
        grid = "" if "--grid" in other["flags"] else f"--grid {part['grid'][0]} {part['grid'][1]}"
        own = summary(f"{kept} {grid} {other['flags']}")
        assert (own["memory"], own["gpus"]) == (other["memory"], other["gpus"])
        assert own["epoch_seconds"] == pytest.approx(other["epoch_seconds"])
        assert own["fits"] is not False
        assert part["fits"] is False or own["epoch_seconds"] < part["epoch_seconds"]


def test_gpus_take_images_and_tiles() -> None:
    """More GPUs than tiles take several images, fewer take several tiles each."""
    one, many, few = (summary(f"{SMALL} --grid 4 --images 30 --gpus {gpus}") for gpus in (16, 64, 5))
    assert (one["images_per_step"], many["images_per_step"], few["images_per_step"]) == (1, 4, 1)
    assert (one["gpus"], many["gpus"], few["gpus"]) == (16, 64, 4), "of 5, in mode layer on 2 x 2"
    ours = summary(f"{SMALL} --grid 4 --images 30 --gpus 64 --images-per-step 2")
    assert (ours["images_per_step"], ours["gpus"]) == (2, 32)
    assert many["epoch_seconds"] == pytest.approx(8 / 1000 * many["milliseconds"])
    assert many["epoch_seconds"] < one["epoch_seconds"] < few["epoch_seconds"]


def test_recomputed_layers_are_counted() -> None:
    roomy, tight = (summary(f"{SMALL} --grid 2 --gpu-memory {memory}") for memory in ("16GiB", "600MiB"))
    assert roomy["recomputed"] == 0 < tight["recomputed"]
    assert tight["memory"] <= 600 * 2**20 < roomy["memory"]


def test_where_no_grid_fits_nothing_is_proposed_and_the_remedy_is_said() -> None:
    line = f"{SMALL} --grid 4 --gpu-memory 10MiB"
    part = summary(line)
    assert (part["fits"], part["better"]) == (False, [])
    assert "does NOT fit; no grid does; use a smaller network" in " ".join(printed(line).split())


def test_an_epoch_is_without_reading_where_reading_has_time() -> None:
    for machine, without in (("h100", True), ("cpu", False)):
        rows = printed(f"{SMALL} --grid 4 --gpus 16 --machine {machine}").splitlines()
        (epoch,) = (row for row in rows if row.startswith("epoch"))
        assert ("if all GPUs together read" in epoch) == without


def test_table_json_and_batch_script_have_one_winner() -> None:
    table = printed(SEARCH)
    part = answer(SEARCH)["search"]
    script = printed(f"{SEARCH} --emit slurm")
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
    table = " ".join(printed(SEARCH).split())
    assert "precision: --precision fp16 takes less time; fp32 without TF32 (train's default) settings: " in table
    assert re.search(r"epoch of the first row: [\d.]+ m?s for 6 images in 3 steps, if all GPUs together read ", table)
    assert re.search(r" memory 1 [\d.]{1,3} ms [\d.]{1,3} ms ", table), "two digits, of what is not measured"
    assert "waits" not in table, "no row has stages"
    assert "--precision fp16 takes" not in printed(f"{SEARCH} --precision fp16")
    assert main([*SEARCH.replace("--images 6", "--images 7").split(), "--gpu-memory", "45GiB"]) == 0
    out, err = capsys.readouterr()
    assert err == "warning: --gpu-memory is 45GiB, but V100 on Summit has 16 GiB\n"
    assert "; an epoch's last step has 1 of 2 images, and idle GPUs" in " ".join(out.split())


def test_blocks_on_the_nodes_disk_are_keys_of_the_job() -> None:
    """A norm over an image that does not fit: by the datasheet's disk, in the table, in JSON, in the script."""
    line = f"{SEARCH} --norm instance --size 1500 --gpu-memory 100MiB --gpus 1 --grid 1"
    best = answer(line)["search"]["best"][0]
    rows, cols = best["memory_keys"]["blocks"]
    assert best["settings"] == "read, in blocks, grid 1 x 1"
    assert best["memory"] <= 100 * 2**20
    assert best["by_term"]["again"] > 0
    assert "chosen, a store" in " ".join(printed(line).split())
    script = printed(f"{line} --emit slurm")
    assert f"--memory.blocks '[{rows},{cols}]'" in script
    assert '--memory.store "$local"' in script


def test_tensors_that_leave_for_the_host_are_keys_of_the_job(tmp_path: Path) -> None:
    """Show offload where the way there is quick: in the table, in JSON, in the script."""
    shipped = Path(find_machine.__code__.co_filename).parent / "machines/h100.yaml"
    profile = yaml.safe_load(shipped.read_text())
    profile["figures"]["stores"]["host"] = {"written": 1e15, "read": 1e15}
    (tmp_path / "quick.yaml").write_text(yaml.safe_dump(profile))
    line = "--search --size 600 --grid 1 --levels 3 --base-channels 8 --norm instance --gpus 1 --gpu-memory 120MiB"
    line += f" --machine {tmp_path / 'quick.yaml'}"
    best = answer(line)["search"]["best"][0]
    assert best["memory_keys"] == {"offload": "auto", "store": "host"}
    words = f"memory.offload auto, memory.store host for {best['away'] / 2**20:.2f} MiB"
    assert f"chosen, recomputing, {words}" in " ".join(printed(line).split())
    script = printed(f"{line} --emit slurm")
    assert "--memory.offload auto --memory.store host" in " ".join(script.replace("\\\n", " ").split())
    assert '"$local"' not in script


@pytest.mark.parametrize(("gpus", "images"), [(30, 6), (18, 4)])  # GPUs hold 4 tiles an image
def test_a_search_proposes_images_of_a_step_that_share_the_gpus_evenly(gpus: int, images: int) -> None:
    line = SEARCH.replace("--gpus 4 --images 6 --images-per-step 2", f"--gpus {gpus} --images 12 --gpu-memory 90MiB")
    table = " ".join(printed(line).split())
    assert f"{images} a step (as many as the GPUs take; --images-per-step sets it)" in table
    assert ("30 at work, on 5 nodes of 6" in table) == (gpus == 30)
