"""The pipeline in the planner's answer, and `plan --stages` as users type it."""

from __future__ import annotations

import json
import time

import pytest

from tiledseg.architecture.presets import PRESETS, build_network
from tiledseg.config.run import ModelConfig
from tiledseg.config.words import SCHEDULES
from tiledseg.pipeline.balance import BalancePrices, choose_balances, cuts, parse_balance
from tiledseg.plan import main
from tiledseg.planning.walk.cost import tile_walk


def answer(capsys: pytest.CaptureFixture[str], line: str) -> dict:
    assert main([*line.split(), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["stages"]


def caps(work: list[int], by_hand: tuple[int, ...]) -> tuple[float, float]:
    """Return all work over that of the slowest stage: of a balance by hand, and of the best contiguous split."""
    both = parse_balance(by_hand, len(work)), choose_balances(BalancePrices(work), 6)[0]
    first, best = (sum(work) / max(sum(work[a:b]) for a, b in cuts(balance)) for balance in both)
    return first, best


@pytest.mark.parametrize(("model", "by_hand", "best"), [("small", 3.70, 4.73), ("large", 3.43, 5.48)])
def test_the_papers_lists_on_our_presets(
    capsys: pytest.CaptureFixture[str], model: str, by_hand: float, best: float
) -> None:
    """Our decoder is as wide as the encoder: convolutions after concatenations are large, and cannot be cut."""
    flags = f"--size 1024 --grid 1 --model {model} --stages 6 --micro-batches 24"
    text = ",".join(map(str, PRESETS[model].balance))
    given, chosen = answer(capsys, f"{flags} --balance [{text}]"), answer(capsys, flags)
    assert given["balance"] == list(PRESETS[model].balance)
    assert (given["automatic"], chosen["automatic"]) == (False, True)
    assert best * 0.85 < chosen["cap"] < best + 0.005, "no cut has a higher cap, but one with less may be faster"
    assert chosen["step"]["speed_up"] > given["step"]["speed_up"]
    layers = build_network(ModelConfig(name=model), 4, 2).graph()
    work = [cost.multiply_adds for cost in tile_walk(layers, 4, (1024, 1024)).costs]
    assert caps(work, PRESETS[model].balance) == pytest.approx((by_hand, best), abs=0.005)
    assert given["cap"] == pytest.approx(by_hand, abs=0.005)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 3])
def test_parts_sum_to_the_whole(capsys: pytest.CaptureFixture[str], schedule: str, stages: int) -> None:
    flags = f"--size 1000 --grid 2 --stages {stages} --micro-batches 7 --schedule {schedule}"
    assert main([*flags.split(), "--format", "json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    part, step = whole["stages"], whole["stages"]["step"]
    rows = part["by_stage"]
    layers = sorted(layer for row in rows for first, stop in row["layers"] for layer in range(first, stop))
    assert layers == list(range(whole["network"]["layers"]))
    assert sum(row["multiply_adds"] for row in rows) == whole["network"]["multiply_adds_context"]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    for key in ("weights", "gradients", "optimizer"):
        assert sum(row["memory"][key] for row in rows) == whole["memory"][key]
    assert all(row["memory"]["total"] == sum(list(row["memory"].values())[:5]) for row in rows)
    lost = [step[f"{key}_milliseconds"] for key in ("work", "imbalance", "recompute", "bubble", "transfer")]
    assert min(lost) >= 0
    assert sum(lost) == pytest.approx(step["milliseconds"], abs=1e-3)
    assert step["speed_up"] == pytest.approx(stages * step["busy_share"], abs=1e-3)
    assert step["speed_up"] <= part["cap"] <= stages
    assert sum(row["activation_bytes"] + row["skip_bytes"] for row in rows) == sum(r["gradient_bytes"] for r in rows)
    assert part["bytes_step"] == sum(row["bytes_step"] for row in rows)
    if stages == 1:
        assert (step["speed_up"], part["bytes_step"]) == (1, 0)
    if schedule == "folded":
        assert all(row["skip_bytes"] == 0 for row in rows)


def test_in_flight_and_the_default_number_of_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--size 1000 --grid 4 --stages 3"
    part = answer(capsys, flags)
    assert part["micro_batches"] == 12
    assert [row["in_flight"] for row in part["by_stage"]] == [[3], [2], [1]]
    part = answer(capsys, f"{flags} --schedule gpipe --micro-batches 5")
    assert [row["in_flight"] for row in part["by_stage"]] == [[5], [5], [5]]
    assert answer(capsys, "--size 1000 --grid 2 --stages 3")["micro_batches"] == 4, "an image has 4 tiles"


def test_recompute_takes_the_words_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    """In the memory of a step, in each halo mode and in stages; the job hands the word on."""
    flags = ["--size", "1000", "--grid", "2", "--stages", "3"]

    def bytes_by(word: str) -> list[int]:
        assert main([*flags, "--recompute", word, "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        modes = [row["memory_rank"] for row in found["modes"]["costs"]]
        return [found["memory"]["total"], *modes, max(row["memory"]["total"] for row in found["stages"]["by_stage"])]

    none, everything = map(bytes_by, ("none", "all"))
    assert bytes_by("auto") == none
    assert all(a > b for a, b in zip(none, everything, strict=True))
    assert main([*flags, "--recompute", "all", "--emit", "slurm"]) == 0
    assert "--memory.recompute all" in capsys.readouterr().out


def test_the_memory_decides_over_the_balance(capsys: pytest.CaptureFixture[str]) -> None:
    """A limit below the fastest balance's need gives another that fits; a given balance is only judged."""
    flags = "--size 1000 --grid 2 --stages 3"
    free = answer(capsys, flags)
    most = max(row["memory"]["total"] for row in free["by_stage"])
    tight = answer(capsys, f"{flags} --gpu-memory {most * 2 // 3}")
    assert tight["balance"] != free["balance"]
    assert all(row["fits"] for row in tight["by_stage"])
    assert tight["cap"] < free["cap"]
    given = answer(capsys, f"{flags} --balance [{','.join(map(str, free['balance']))}] --gpu-memory {most - 1}")
    assert [row["fits"] for row in given["by_stage"]].count(False) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "folded"])
def test_recomputation_takes_memory_off_and_adds_a_forward_pass(
    capsys: pytest.CaptureFixture[str], schedule: str
) -> None:
    """Each stage may have a mode of its own: the first, which has most in flight, say."""
    flags = f"--size 1000 --grid 2 --stages 3 --micro-batches 8 --schedule {schedule}"
    never = answer(capsys, f"{flags} --recompute never")
    flags += f" --balance [{','.join(map(str, never['balance']))}]"
    last, always = (answer(capsys, f"{flags} --recompute {word}") for word in ("except_last", "always"))
    for row, some, least in zip(never["by_stage"], last["by_stage"], always["by_stage"], strict=True):
        assert (row["recompute"], least["recompute"]) == ("never", "always")
        assert row["memory"]["activations"] >= some["memory"]["activations"] >= least["memory"]["activations"]
        assert least["milliseconds"] == pytest.approx(row["milliseconds"] + row["forward_milliseconds"], abs=1e-3)
    assert always["by_stage"][0]["memory"]["total"] < 0.7 * never["by_stage"][0]["memory"]["total"]
    parts = [always["step"][f"{key}_milliseconds"] for key in ("work", "imbalance", "recompute", "bubble", "transfer")]
    assert sum(parts) == pytest.approx(always["step"]["milliseconds"], abs=1e-3)
    assert always["step"]["recompute_milliseconds"] > 0 == never["step"]["recompute_milliseconds"]
    assert always["step"]["speed_up"] < never["step"]["speed_up"]
    flags += f" --balance [{','.join(map(str, never['balance']))}]"
    mixed = answer(capsys, f"{flags} --recompute [always,never,never]")
    assert mixed["by_stage"][0]["memory"]["total"] < never["by_stage"][0]["memory"]["total"]
    assert mixed["by_stage"][1:] == never["by_stage"][1:]


def test_a_quick_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """By the processor's time: 3 s where this was written, whoever loads the machine too."""
    begun = time.process_time()
    assert answer(capsys, "--size 10000 --grid 8 --model large --stages 6 --gpu-memory 192GiB")["micro_batches"] == 24
    assert time.process_time() - begun < 12
