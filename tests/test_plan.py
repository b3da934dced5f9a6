"""The command as users type it."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tiledseg.plan import main

TWO, SMALL = "--size 1000 --grid 2", "--size 2000 --levels 4 --base-channels 16"
SCALING = "--size 600 --scaling 1:2 --machine summit"
SEARCH = "--search --size 900 --levels 3 --base-channels 8 --gpus 4 --images 6 --images-per-step 2 --machine summit"
JOB = "--size 10000 --grid 8"
GOLDEN = "--size 10000 --grid 8 --levels 5 --convs-per-level 2 --kernel 3 --format json"


def answer(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert main([*line.split(), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


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


def test_every_flag_changes_its_figure(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "--size 2000 --grid 4")
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
        found = answer(capsys, f"--size 2000 --grid 4 {flags}")
        assert found[part][key] == value, flags
        assert plain[part].get(key) != value, flags


def test_another_stride_has_the_formula_only(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--size 1000 --grid 4 --stride 2")
    assert found.keys() == {"paper", "omitted", "cluster"}
    assert "nothing is exact for stride 2" in found["omitted"]["reason"]
    assert main(["--size", "1000", "--grid", "4", "--stride", "2"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"^(\w+ ?\w*): ", text, re.MULTILINE) == ["cluster", "paper", "left out"]


def test_the_work_of_an_image_grows_as_the_pixels_of_its_contexts_do(capsys: pytest.CaptureFixture[str]) -> None:
    cut, whole = (answer(capsys, f"--size 500 700 --levels 4 --base-channels 4 --grid {grid}") for grid in ("3 2", "1"))
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


def test_memory_norms_and_small_grids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = answer(capsys, f"--size 2000 --grid 4 {slow_links(tmp_path)}")["modes"]
    assert (slow["choice"]["mode"], slow["choice"]["fusion"], slow["mesh"]) == ("read", None, [4, 4])
    assert slow["gradient_all_reduce"]["bytes"] == 8 * 31_032_386
    papers = answer(capsys, "--size 10000 --grid 8")["modes"]
    read, exchange, layer = papers["costs"]
    assert [row["messages_rank"] for row in papers["costs"]] == [0, 8, 36 * 8 - 8]
    assert exchange["bytes_rank"] == 8_257_536
    assert exchange["pixels_read"] == layer["pixels_read"] == 10_000**2 < read["pixels_read"]
    assert layer["multiply_adds"] == papers["multiply_adds_undivided"] < read["multiply_adds"]
    tight = answer(capsys, "--size 2000 --grid 4 --mesh 1 --gpu-memory 4GiB")["modes"]
    assert [row["fits"] for row in tight["costs"]] == [True, True, False]
    assert tight["choice"]["mode"] == "read"
    norm = answer(capsys, f"--size 1000 --grid 2 --norm batch {slow_links(tmp_path)}")["modes"]
    assert norm["choice"]["mode"] == "layer"
    assert [row["exact"] for row in norm["costs"]] == [False, False, True]
    one = answer(capsys, "--size 1000 --grid 1 --norm batch")["modes"]
    assert {row["milliseconds"] for row in one["costs"]} == {one["costs"][0]["milliseconds"]}


def test_a_mesh_that_layer_mode_cannot_have_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--size 33 --grid 3 --padding valid"
    row = answer(capsys, flags)["modes"]["costs"][-1]
    assert (row["mode"], row["possible"]) == ("layer", False)
    assert "own" in row["reason"]
    assert main([*flags.split(), "--show", "modes"]) == 0
    assert "layer: not possible" in capsys.readouterr().out


@pytest.mark.parametrize("given", ["--size 3000 --grid 1 --gpu-memory 1GiB", "--size 10000 --grid 2 --gpu-memory 3GiB"])
def test_a_refusal_names_a_grid_that_does(capsys: pytest.CaptureFixture[str], given: str) -> None:
    """Of tiles that are too large for the memory, and for a kernel."""
    main([*given.split(), "--show", "memory"])
    said = capsys.readouterr()
    grids = set(re.findall(r"use --grid (\d+ \d+)|: \[(\d+,\d+)\] does", said.out + said.err))
    assert len(grids) == 1
    grid = " ".join(grids.pop()).replace(",", " ").split()
    words = given.split()
    assert main([*words[:2], "--grid", *grid, *words[4:], "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["fits"]
    assert found["modes"]["choice"]["mode"] is not None


def test_table_shows_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--size 10000 --grid 8 --gpu-memory 3GiB --images 100 --gpus 1200"
    texts = []
    for show in ("", " --show memory,modes", " --show all"):
        assert main(f"{flags}{show}".split()) == 0
        texts.append(capsys.readouterr().out)
    plain, some, text = texts
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
    line: str, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_machine_says_the_memory_and_the_gpus_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are given win."""
    line = "--size 20000 --grid auto --machine h200"
    by_machine = answer(capsys, line)
    assert by_machine == answer(capsys, f"{line} --gpu-memory 141GiB --gpus-per-node 8")
    assert (by_machine["memory"]["gpu"], by_machine["cluster"]["gpus_per_node"]) == (141 * 2**30, 8)
    given = answer(capsys, f"{line} --gpu-memory 16GiB --gpus-per-node 4")
    assert (given["memory"]["gpu"], given["cluster"]["gpus_per_node"]) == (16 * 2**30, 4)
    assert given["exact"]["tiles"] > by_machine["exact"]["tiles"]
    assert main(line.split()) == 0
    assert "nodes of 8" in capsys.readouterr().out
