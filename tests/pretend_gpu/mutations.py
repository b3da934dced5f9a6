"""Faults put into a copy of the package on purpose: what the pretend GPU must catch.

Each is a file, a piece of it, what it becomes, and the job that shows it (`test_mutations.py`).
"""

RUNS, OVER_MPI, OVER_NCCL = "runs", "2 ranks over mpi", "2 ranks over nccl"
MUTATIONS: dict[str, tuple[str, str, str, str]] = {
    "a lane does not wait for computing": ("memory/host.py", "lane.wait_stream(stream)", "pass", RUNS),
    "computing does not wait for a copy in": ("memory/host.py", "stream.wait_event(event)", "pass", RUNS),
    "a step does not wait for its input": (
        "execution/carrying.py",
        "stream.wait_event(self.event)",
        "pass",
        RUNS,
    ),
    "an input's memory is given out early": (
        "execution/carrying.py",
        "tensor.record_stream(stream)",
        "pass",
        RUNS,
    ),
    "a map is taken before it is there": ("inference/mapping.py", "self.sent.synchronize()", "pass", RUNS),
    "a checkpoint is written before it is there": (
        "checkpoint/background.py",
        "torch.cuda.synchronize(device)",
        "pass",
        RUNS,
    ),
    "a validation reads before its sums are there": (
        "training/validation.py",
        "torch.cuda.current_stream(mesh.device).synchronize()",
        "pass",
        RUNS,
    ),
    "a table stays on the host": (
        "models/sending.py",
        '    if device.type != "cuda":\n        return tensor.to(device)',
        "    return tensor",
        RUNS,
    ),
    "a tensor is pinned and not whole": (
        "models/sending.py",
        "return pinned.copy_(tensor).to(",
        "return pinned.to(",
        RUNS,
    ),
    "a reader takes the first GPU": (
        "execution/carrying.py",
        "torch.cuda.device(stream.device), ",
        "",
        OVER_NCCL,
    ),
    "a message is staged asynchronously": (
        "comm/transports/point_to_point.py",
        "buffer.copy_(as_bytes(tensor))",
        "buffer.copy_(as_bytes(tensor), non_blocking=True)",
        OVER_MPI,
    ),
    "nobody waits for NCCL": (
        "comm/transports/transport_torch.py",
        "            work.wait()",
        "            pass",
        OVER_NCCL,
    ),
}
