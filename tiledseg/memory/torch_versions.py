"""The differences between the promised versions of torch, 2.8 to 2.15: each is met here, or named with its place.

| versions | difference | met by |
| --- | --- | --- |
| before 2.8 | Gloo's destructor holds the interpreter: ranks hang at their end | `check_version`, a refusal |
| 2.8 (not from 2.13 on) | Gloo prints lines about its peers on standard output as a group is made | `gloo_connects` |
| 2.8 to 2.11 | `checkpoint` reads `grad_fn` of a tensor of its own | `is_own_read`, in tracing |
| to 2.13 | a GPU's gradient of padded average pooling in channels_last (pytorch#188344) | `models.layers.pooling` |
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiledseg.errors import ConfigError
from tiledseg.system.console import keep_descriptors

OLDEST = 2, 8
_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])
_QUIET_GLOO = 2, 13


def check_version() -> None:
    """Raise ConfigError for a torch that is older than the promised ones."""
    if _VERSION < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"torch {torch.__version__} is too old, its ranks hang; pip install 'torch>={oldest}'")


@contextmanager
def gloo_connects() -> Iterator[None]:
    """Send what Gloo prints on standard output inside to standard error: it would stand in a command's answer."""
    if _VERSION >= _QUIET_GLOO:
        yield
        return
    keep_descriptors()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def is_own_read(name: str, caller: str) -> bool:
    """Return True if torch itself, in the file `caller`, reads the attribute `name` of a tensor that is no module's."""
    return name == "grad_fn" and caller.endswith("torch/utils/checkpoint.py")
