"""Weights that a network has under several names: a head that is called twice, a bias that two layers have."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def by_memory(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """The tensors in groups of those that lie in one piece of memory, in the order of their first names."""
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.untyped_storage().data_ptr() or id(tensor), {})[name] = tensor
    return list(groups.values())
