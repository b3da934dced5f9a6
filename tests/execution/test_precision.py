"""Which kernels a run takes, and that none of its results stands in memory that nobody wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.law.cases import one_rank
from tests.law.steps import Steps, check_same_bits, train
from tests.law.test_devices import CASE
from tiledseg.errors import ConfigError
from tiledseg.execution.carrying import make_deterministic, naming_disorder, use_one_kernel

CPU = torch.device("cpu")
FLAGS = (
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cudnn, "allow_tf32"),
)


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    before = [getattr(place, name) for place, name in FLAGS]
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(False)  # as it is in a new process: another test may have trained in this one
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    for (place, name), value in zip(FLAGS, before, strict=True):
        setattr(place, name, value)


def test_a_map_asks_for_one_kernel_and_no_more() -> None:
    """Slow deterministic kernels serve the backward pass, which a map has not."""
    use_one_kernel(True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_deterministic_training_does_not_fill_new_memory() -> None:
    make_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.empty(1 << 12).isnan().all()


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16"])
def test_no_result_stands_in_memory_that_nobody_wrote(precision: str) -> None:
    """New memory filled with NaN changes no bit of a step."""
    make_deterministic(True)
    steps = Steps(CASE, images=((0,),), precision=precision)
    found = train(steps, one_rank())
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    check_same_bits(train(steps, one_rank()), found)


def test_a_kernel_without_an_order_is_named_in_a_line() -> None:
    """Other errors pass as they are."""
    words = "grid_sampler_2d_backward_cuda does not have a deterministic implementation"
    line = f"^train.deterministic is true, but {words}; give train.deterministic false$"
    with pytest.raises(ConfigError, match=line), naming_disorder():
        raise RuntimeError(f"{words}, but you set 'torch.use_deterministic_algorithms(True)'. You can\nturn it off")
    with pytest.raises(RuntimeError, match="other"), naming_disorder():
        raise RuntimeError("other")
