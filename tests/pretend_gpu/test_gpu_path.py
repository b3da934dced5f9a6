"""The path of a GPU: kernels that add in one order or are refused, one device a rank, waits, peaks, draws. The pretend
GPU finds races, waits and mixed devices, and lets sound programs pass."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import rasterio

import tiledseg
from tests.conftest import NIGHTLY
from tests.crash.runs import Material
from tests.law.fixed_size import fixed_size
from tests.pretend_gpu.harness import PretendGpu
from tests.small_files import write_raster, write_yaml


def test_every_traced_function_trains_in_one_order_or_is_refused_in_a_line(any_gpu: PretendGpu) -> None:
    """In deterministic mode, with the CPU's values and gradients: also of formulas that weights are computed by."""
    output = any_gpu.run(["-m", "tests.pretend_gpu.traced_functions"]).sound().out
    found = dict(line.split(": ", 1) for line in output.splitlines())
    refused = {name for name, end in found.items() if end.startswith("refused")}
    assert refused <= {"local_response_norm", "weights' bicubic", "weights' reflection"}, output
    assert not any(end.endswith("apart") for end in found.values()), output
    assert len([end for end in found.values() if end == "trains"]) > (120 if NIGHTLY else 50), output
    line = r"refused: train.deterministic is true, but (aten::)?avg_pool3d_backward"  # with its namespace if pretended
    assert re.match(line, found["local_response_norm"]), output


def command(material: Material, folder: Path, options: dict[str, str], **groups: dict[str, Any]) -> list[str]:
    """A run of two epochs, an image a step, with these groups in the place of the configuration's."""
    train = {"epochs": 2, "images_per_step": 1, "checkpoint_every": 2, "seed": 3}
    write_yaml(folder.with_suffix(".yaml"), {**material.config(), "train": train, **groups})
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    return ["train", "--config", str(folder.with_suffix(".yaml")), "--run.output", str(folder), *flags]


MAIN = "from tiledseg.train import main\n"
BUILT = """
import torch
from torch import nn

def unordered(bands, classes):
    return nn.Sequential(nn.Conv2d(bands, 4, 3, padding=1), nn.LocalResponseNorm(3), nn.Conv2d(4, classes, 1))
"""


def test_a_network_without_an_order_is_refused_in_a_line(
    any_gpu: PretendGpu, material: Material, tmp_path: Path
) -> None:
    (material.root / "built.py").write_text(BUILT)
    runs = [command(material, tmp_path / f"run{k}", {}, model={"build": "built:unordered"})[1:] for k in range(2)]
    runs[1] += ["--train.deterministic", "false"]
    path = f"import sys\nsys.path.append({str(material.root)!r})\n"
    ran = any_gpu.python(f"{path}{MAIN}print([main(words) for words in {runs!r}])")
    assert ran.sound().out == "[2, 0]\n"
    assert ran.err.count("error: train.deterministic is true, but") == ran.err.count("error: ") == 1, ran.err
    assert "Traceback" not in ran.err


def test_the_host_waits_once_a_step_and_a_checkpoint(
    pretend_gpu: PretendGpu, material: Material, tmp_path: Path
) -> None:
    """And once a tile validated, in mode layer, where an image is one: four steps, two validations, two checkpoints."""
    model = {"levels": 2, "convs_per_level": 1, "base_channels": 3, "norm": "batch"}
    options = {"parallel.halo": "layer", "optimizer.name": "sgd", "optimizer.clip_norm": "0.5"}
    ran = pretend_gpu.run(["-m", "tiledseg", *command(material, tmp_path / "run", options, model=model)]).sound()
    waits = ran.report["waits"]
    innermost = [(f"{kind} {where.split(' < ')[0]}", count) for kind, where, count in waits]
    expected = {
        "tiledseg/training/step.py": 4,
        "event tiledseg/memory/device.py": 8,  # of a checkpoint's copies, and of the times of steps that are over
        "agreement.py": 2,
    }
    found = {place: sum(count for at, count in innermost if place in at) for place in expected}
    assert found == expected, waits
    # Of the start; of a validation's sums.
    known = "parallel_run.py", "device.py", "validation.py"
    others = [at for at, _ in innermost if not any(place in at for place in (*expected, *known))]
    assert not others, others


THREADS = """
import threading, torch
from benchmarks.gpu.waiting import drawn
from tiledseg.execution.carrying import network_input, sender
device = torch.device("cuda", 1)
torch.cuda.set_device(device)
send, sent = sender(device), []
for _ in range(2):
    thread = threading.Thread(target=lambda: sent.append(send(drawn(32))))
    thread.start(), thread.join()
network_input(sent[0], device).sum().item()
"""


def test_a_rank_of_the_second_gpu_touches_that_one_alone(pretend_gpu: PretendGpu) -> None:
    """In its reading threads too, which begin with GPU 0."""
    ran = pretend_gpu.python(THREADS, devices=2).sound()
    assert list(ran.report["contexts"]) == ["1"]


def test_tracing_on_a_node_of_several_gpus_says_nothing_of_their_draws(any_gpu: PretendGpu) -> None:
    code = """
import warnings, torch
warnings.simplefilter("error")
from tiledseg.tracing.trace import trace
trace(torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.GELU()), 2)
"""
    any_gpu.python(code, devices=4).sound()


def test_the_peak_is_that_of_the_run(any_gpu: PretendGpu, material: Material, tmp_path: Path) -> None:
    """Not of what the process has held before."""
    code = f"""
import torch
from tiledseg.train import main
before = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
del before
raise SystemExit(main({command(material, tmp_path / "run", {})[1:]!r}))
"""
    any_gpu.python(code).sound()
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert 0 < line["memory_bytes"] < 1 << 27


def test_memory_that_a_library_lacks_is_a_line_with_what_would_fit(
    pretend_gpu: PretendGpu, material: Material, tmp_path: Path
) -> None:
    failures = (
        ("AcceleratorError", "CUDA error: out of memory"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    )
    runs = [(failure, command(material, tmp_path / failure[0], {})[1:]) for failure in failures]
    code = f"""
import torch
from tests.pretend_gpu.device import gpu
{MAIN}
for failure, words in {runs!r}:
    gpu.failures["aten::convolution_backward"] = failure
    print(main(words))
"""
    ran = pretend_gpu.python(code)
    assert ran.out == "1\n1\n", ran.err
    assert [line.partition("; ")[0] for line in ran.err.splitlines()] == ["error: memory has run out"] * 2
    assert "memory.budget" in ran.err, ran.err
    assert "Traceback" not in ran.err, ran.err


CROPS = """
import sys, torch, tiledseg
from tests.law.fixed_size import fixed_size
from tiledseg.tracing import crops
sizes, scores_of = set(), crops.scores_of
def counted(module, x_BCHW):
    sizes.add(len(x_BCHW))
    return scores_of(module, x_BCHW)
crops.scores_of = counted
image, output, shares = sys.argv[1:]
tiledseg.predict_raster(fixed_size(), image, output, probabilities=shares, window=12, grid=(2, 3))
print(sorted(sizes))
"""


def test_crops_go_in_batches_of_one_size(pretend_gpu: PretendGpu, tmp_path: Path) -> None:
    """And give the map of a CPU, but for rounding: its batches are others."""
    image, shares = tmp_path / "image.tif", list[Any]()
    write_raster(image, np.random.default_rng(2).integers(1, 256, (3, 45, 67), np.uint8))
    files = {name: [str(tmp_path / f"{name}{end}.tif") for end in ("", "-shares")] for name in ("gpu", "cpu")}
    ran = pretend_gpu.run(["-c", CROPS, str(image), *files["gpu"]]).sound()
    assert ran.out.splitlines()[-1] == "[1, 16]"  # alone, where the module is looked at
    tiledseg.predict_raster(fixed_size(), image, files["cpu"][0], probabilities=files["cpu"][1], window=12)
    for _, path in files.values():
        with rasterio.open(path) as file:
            shares.append(file.read())
    np.testing.assert_allclose(*shares, rtol=0, atol=1e-5)


RACES = """
import torch
from tests.pretend_gpu.device import gpu

side = torch.cuda.Stream()

def racy(body):
    gpu.races.clear()
    body()
    torch.cuda.synchronize()
    return bool(gpu.races)

def unordered():
    x = torch.zeros(4, device="cuda")
    with torch.cuda.stream(side):
        x.add_(1)

def ordered():
    x = torch.zeros(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    x.add_(1)

def freed_early(record):
    x = torch.zeros(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if record:
        x.record_stream(side)
    del x
    torch.zeros(4, device="cuda")

def pinned_source(wait):
    source = torch.zeros(4).pin_memory()
    source.to("cuda", non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    source.fill_(1)
    torch.cuda.synchronize()

assert racy(unordered) and not racy(ordered)
assert racy(lambda: freed_early(False)) and not racy(lambda: freed_early(True))
assert racy(lambda: pinned_source(False)) and not racy(lambda: pinned_source(True))

target = torch.zeros(4).pin_memory()
target.copy_(torch.ones(4, device="cuda"), non_blocking=True)
assert not (target == 1).any()
done = torch.cuda.Event()
done.record()
done.synchronize()
assert (target == 1).all()

assert torch.empty(3, device="cuda").cpu().isnan().all()
try:
    torch.ones(2, device="cuda") + torch.ones(2)
    raise SystemExit("mixed devices")
except RuntimeError as error:
    assert "same device" in str(error)
torch.use_deterministic_algorithms(True)
x = torch.ones(1, 1, 4, 4, device="cuda", requires_grad=True)
try:
    torch.nn.functional.pad(x, (1, 1, 1, 1), mode="reflect").sum().backward()
    raise SystemExit("deterministic")
except RuntimeError as error:
    assert "deterministic" in str(error)
gpu.failures["aten::convolution"] = "AcceleratorError", "CUDA error: out of memory"
try:
    torch.nn.functional.conv2d(x, x[:, :, :3, :3])
    raise SystemExit("no failure")
except torch.AcceleratorError as error:
    assert "out of memory" in str(error)
gpu.races.clear(), gpu.waits.clear()
torch.ones(2, device="cuda").sum().item()
"""


def test_races_waits_and_failures(pretend_gpu: PretendGpu) -> None:
    waits = pretend_gpu.python(RACES).sound().report["waits"]
    assert [(kind, count) for kind, _, count in waits] == [("item", 1)]
