"""Loads the pretend GPU at the start of each Python process that the harness starts, since torch must come after it."""

from tests.pretend_gpu import torch_cuda  # noqa: F401  (it takes the place of torch.cuda's functions)
