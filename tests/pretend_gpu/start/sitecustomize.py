"""Loads the pretend GPU at the start of each Python process that the harness starts, since torch must come after it."""

import os

if "PRETEND_GPU" in os.environ:
    from tests.pretend_gpu import torch_cuda  # noqa: F401  (it takes the place of torch.cuda's functions)

    if os.environ.get("PRETEND_GPU_TRANSPORT") == "nccl":
        from tests.pretend_gpu import nccl  # noqa: F401
