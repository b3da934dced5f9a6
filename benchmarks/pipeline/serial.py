r"""The same step in one process, without any pipeline: the time that every pipeline is divided into.

python -m benchmarks.pipeline.serial --micro-batches 16 [--layout channels_last] [--threads 1]
"""

from __future__ import annotations

import sys

import torch

from benchmarks.measurement import measure
from benchmarks.pipeline.request import Carried, Request, compare, parser_of, report, request_of, serial_gradients
from benchmarks.pipeline.workload import Gradients, gradients_of, make_input, make_network, serial_step
from tiledseg.errors import ConfigError


def run(request: Request, threads: int) -> None:
    workload = request.workload
    torch.set_num_threads(threads)
    network = make_network(workload)
    inputs = [make_input(workload, m) for m in range(workload.micro_batches)]

    def step() -> float:
        network.zero_grad()
        return serial_step(network, workload, inputs)

    found = Gradients(step(), gradients_of(network))
    equal = compare(found, serial_gradients(request))
    spent = measure(step, lambda: None, request.repeat, request.warm_up)
    figures = {**spent.to_dict(), **Carried().to_dict(), "loss": found.loss, **equal, "threads": threads}
    report("one process", "serial", request, figures)


def main() -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--threads", type=int, default=1, help="of an operator")
    parser.set_defaults(stages=1)
    given = parser.parse_args()
    try:
        run(request_of(given), given.threads)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
