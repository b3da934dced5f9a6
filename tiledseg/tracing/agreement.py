"""The check at the place of use: a traced graph gives on real data what its module gives, or the run ends.

A crop is compared in float64, with gradients in training, and a whole window in its dtype; on copies, with the
generators set back. A difference is rounding where the module's own output moves as much when its input moves by a few
last digits. Dropout keeps all channels in both, and scales them.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, first_line
from tiledseg.execution.memory import free_memory
from tiledseg.execution.precision import autocast
from tiledseg.geometry.shapes import is_legal_size, tensor_shapes
from tiledseg.memory.allocations import is_exhausted
from tiledseg.models.layers.pixelwise import to_layout
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.calls import Call, Made, where
from tiledseg.tracing.compare import Gaps, advance, as_trained, copied, differences, gap, same_conditions
from tiledseg.tracing.record import record

SIDES = 64, 128, 256  # pixels of a crop: the first at which the module runs in float64
EXACT = 1e-8  # of the largest value: of outputs and gradients in float64
ROUNDINGS = 16.0  # of a dtype, of the largest value, whatever the network
TRIES = 2048  # sizes looked at for a legal one
_WIDE = torch.float64.itemsize
Load = Callable[[], torch.Tensor | None]


def verify_first(
    network: GraphNetwork, load: Load, mesh: Mesh, precision: str, most: int, say: Callable[[str], None]
) -> None:
    """End the run where a traced network does not give what its module gives on the input that `load` reads, in at most
    `most` bytes. Collective: rank 0 looks, and the others wait for its one broadcast, which carries an error too.
    """

    def look() -> str:
        x_BCHW, weight = load(), next(network.recorded.module.parameters(), torch.zeros(()))
        if x_BCHW is None:
            return "not checked: the first rank computes nothing"
        with autocast(precision, weight.device):
            return verified(network, x_BCHW.to(weight.device), free_memory(mesh, weight.device), most)

    line = mesh.on_root(look)
    if mesh.is_root:
        say(line)


def verified(network: GraphNetwork, x_BCHW: torch.Tensor, memory: int, most: int | None = None) -> str:
    """Compare a traced network with its module on real input, in at most `memory` bytes, `most` of them activations.
    Return the line for the log. Raise ConfigError that names the first node that differs.
    """
    begun, name = time.perf_counter(), type(network.recorded.module).__name__
    room = memory - 3 * sum(tensor.numel() * _WIDE for tensor in network.state_dict().values())
    room = room if most is None else min(room, most)
    try:
        plain = copied(network, False)
    except Exception as error:  # whatever an attribute of the module raises
        return f"not checked: {name} cannot be copied ({type(error).__name__}: {first_line(error)})"
    x_BCHW = x_BCHW.detach()
    window_BCHW = _fitted(network, x_BCHW, room)
    while window_BCHW is not None:
        try:
            _check(network, plain, window_BCHW, room)
        except (RuntimeError, MemoryError) as error:
            if not is_exhausted(error):
                raise
            window_BCHW = _fitted(network, window_BCHW, _bytes(network, window_BCHW) // 4)
            continue
        part = "" if window_BCHW is x_BCHW else f" (of {x_BCHW.shape[2]} x {x_BCHW.shape[3]})"
        seconds = time.perf_counter() - begun
        return f"checked: the graph gives what {name} gives on {_size(window_BCHW)}{part}, {seconds:.1f} s"
    return f"not checked: no part of {_size(x_BCHW)} suits {name} and the free memory"


def _check(network: GraphNetwork, plain: GraphNetwork, window_BCHW: torch.Tensor, room: int) -> None:
    """Compare on a crop in float64 (in the run's dtype where the module knows no float64), in training with gradients,
    and on the whole window in the run's dtype."""
    backward, epsilon, twin = network.training and torch.is_grad_enabled(), _epsilon(window_BCHW), copied(network, True)
    looked = False
    for precise, side in itertools.product((True, False), SIDES):
        sizes = (range(min(side, most), most) for most in window_BCHW.shape[2:])
        least = [next((n for n in each if is_legal_size(network.graph, n)), each.stop) for each in sizes]
        crop_BCHW = _crop(window_BCHW, least)
        if looked or _bytes(network, crop_BCHW, _WIDE * (3 if backward else 1)) > room:
            continue
        relative, each = (EXACT, twin) if precise else (1e4 * epsilon, plain)
        rounding = 16 * torch.finfo(torch.float64 if precise else crop_BCHW.dtype).eps
        try:
            apart, looked = differences(each, crop_BCHW, relative, precise, backward, epsilon=rounding), True
        except Exception as error:  # whatever the module raises, in float64 or on a small crop
            if is_exhausted(error):
                raise
            continue
        _refuse(network, crop_BCHW, apart, relative, precise)
    relative = EXACT if window_BCHW.dtype == torch.float64 else ROUNDINGS * epsilon
    try:
        apart = differences(plain, window_BCHW, relative, epsilon=4 * epsilon)
    except Exception as error:
        if is_exhausted(error):
            raise
        what = f"{type(network.recorded.module).__name__} does not run on {_size(window_BCHW)} of the data"
        said = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{what}: {said}; mend it, or choose another size of tiles") from error
    _refuse(network, window_BCHW, apart, relative, False)


def _refuse(network: GraphNetwork, x_BCHW: torch.Tensor, apart: Gaps, relative: float, precise: bool) -> None:
    """Raise ConfigError for a difference. It names the last of the gradients, which a backward pass makes first."""
    if not apart:
        return
    outputs = [name for name in apart if not name.startswith("gradient")]
    name = outputs[0] if outputs else list(apart)[-1]
    most, size = apart[name]
    place = _first_differing(network, x_BCHW, relative, precise) if outputs else "a backward pass of its own, after it"
    mode = " in training" if network.training else ""
    name_of = type(network.recorded.module).__name__
    what = f"{name_of} computes{mode} what its graph does not, on {_size(x_BCHW)} of the data"
    remedy = "write that in other words, or set verify to false (docs/explanation/exactness.md)"
    raise ConfigError(f"{what}: {name} differs by {most:.1e} of {size:.1e}; first: {place}; {remedy}")


def _first_differing(network: GraphNetwork, x_BCHW: torch.Tensor, relative: float, precise: bool) -> str:
    """Return in words the first node whose tensor differs: module and graph run side by side, call by call."""
    module, graph = copied(network, precise), copied(network, precise)
    recorded, places, done = module.recorded, list[str](), 0
    x_BCHW = x_BCHW.to(torch.float64 if precise else x_BCHW.dtype)
    tensors = {0: x_BCHW.clone()}

    def watch(calls: list[Call], parts: list[torch.Tensor]) -> None:
        nonlocal done
        at, call = len(calls) - 1, where(calls[-1])
        traced = recorded.calls[at] if at < len(recorded.calls) else ""
        # Without lines: those of a Sequential are its caller's.
        if not places and call.rpartition(", ")[0] != traced.rpartition(", ")[0]:
            places.append(f"{call} is called, which was not when it was traced")
        for part, tensor in enumerate(parts):
            node, layout = recorded.made.get(Made(at, part), (-1, None))
            if places or node < done:
                continue
            advance(graph, tensors, done, node + 1)
            done = node + 1
            most, size = gap(to_layout(tensors[done], layout), tensor)
            if not most <= relative * size:
                places.append(f"node '{network.graph.nodes[node].name}' by {most:.1e} of {size:.1e}, {traced}")

    with contextlib.suppress(Exception), torch.no_grad(), same_conditions(x_BCHW.device, precise):
        record(as_trained(module), x_BCHW.clone(), watch=watch)
    return places[0] if places else "what it returns, or leaves behind, of nodes that agree"


def _fitted(network: GraphNetwork, x_BCHW: torch.Tensor, room: int) -> torch.Tensor | None:
    """Return the input, or a legal part of it whose tensors fill at most `room` bytes; None where none does."""
    sizes = list(x_BCHW.shape[2:])
    while min(sizes) > 0:
        tried = (range(most, max(0, most - TRIES), -1) for most in sizes)
        sizes = [next((n for n in each if is_legal_size(network.graph, n)), 0) for each in tried]
        if min(sizes) and _bytes(network, x_BCHW[:, :, : sizes[0], : sizes[1]]) <= room:
            return _crop(x_BCHW, sizes)
        sizes[sizes.index(max(sizes))] //= 2
    return None


def _bytes(network: GraphNetwork, x_BCHW: torch.Tensor, width: int | None = None) -> int:
    """Return the bytes of all tensors at once, as an author may hold them, and half as much for what kernels need."""
    batch, _, *size = x_BCHW.shape
    shapes = tensor_shapes(network.graph, network.bands, *size)
    return 3 * batch * (width or x_BCHW.element_size()) * sum(count * rows * cols for count, rows, cols in shapes) // 2


def _crop(x_BCHW: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Return the middle of an image, or the image itself where it has this size."""
    if list(x_BCHW.shape[2:]) == size:
        return x_BCHW
    top, left = ((have - want) // 2 for have, want in zip(x_BCHW.shape[2:], size, strict=True))
    return x_BCHW[:, :, top : top + size[0], left : left + size[1]]


def _epsilon(x_BCHW: torch.Tensor) -> float:
    """Return the rounding of the run's dtype."""
    device = x_BCHW.device.type
    cast = torch.is_autocast_enabled(device)
    return torch.finfo(torch.get_autocast_dtype(device) if cast else x_BCHW.dtype).eps


def _size(x_BCHW: torch.Tensor) -> str:
    return f"{x_BCHW.shape[2]} x {x_BCHW.shape[3]} pixels"
