"""An exponential moving average of the weights, with which a run validates and maps; the training goes on with its own.

After step t, counted from 1: average <- d average + (1 - d) weights, with d = min(decay, (1 + t) / (10 + t)). So a
young average soon forgets its first weights (TensorFlow's ExponentialMovingAverage, num_updates).
Running statistics are averaged alike; counts are taken over. It begins as the weights that the run begins with.

Each rank averages what it holds. Ranks that hold the same weights get the same average, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tiledseg.execution.agreement import own_state
from tiledseg.models.frozen import by_memory


class AveragedWeights:
    """An average of this rank's part of `network`, in its dtypes; `begun`: of a run that goes on, of the whole network,
    tensor by tensor."""

    def __init__(self, network: nn.Module, decay: float, begun: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._network, self._decay = network, decay
        self.tensors = {name: tensor.clone() for name, tensor in own_state(network).items()}
        for name, tensor in begun:
            if name in self.tensors:
                self.tensors[name].copy_(tensor)

    def update(self, step: int) -> None:
        """Add the weights after optimizer step number `step`, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, tensor in own_state(self._network).items():
                average = self.tensors[name]
                if average.is_floating_point():
                    average.lerp_(tensor, share)
                else:
                    average.copy_(tensor)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the network the averaged weights in the block; afterwards its own again, to the last bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for names in by_memory(own_state(self._network)):
                held = {name: tensor.clone() for name, tensor in names.items()}
                for name, tensor in names.items():
                    tensor.copy_(self.tensors[name])
                for name, tensor in held.items():
                    self.tensors[name].copy_(tensor)
