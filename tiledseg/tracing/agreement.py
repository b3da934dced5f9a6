"""The check at the place of use: a traced graph gives on real data what its module gives, or the run ends.

Two comparisons, all on copies that are let go, with the generators set back: no number of a run moves.

- **A crop in float64**, in training with the backward pass: rounding is 1e-16 there, so that a term of 1e-8 is seen
  whatever the dtype of the run. The module's own run in the dtype says how much rounding means in this network.
- **A whole window in its dtype**, whose size and pixels may take the module another way. It may differ by eight times
  the rounding of the crop.

Dropout keeps all channels in both, and scales them: a graph drops channels, whatever the module drops.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping

import torch

from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, GeometryError, first_line
from tiledseg.execution.memory import free_memory
from tiledseg.execution.precision import autocast
from tiledseg.geometry.graph import Graph
from tiledseg.geometry.receptive_field import output_size
from tiledseg.geometry.shapes import tensor_shapes
from tiledseg.memory.exhausted import is_exhausted
from tiledseg.models.layers.pixelwise import to_layout
from tiledseg.models.network import GraphNetwork
from tiledseg.tracing.calls import Call, Made, where
from tiledseg.tracing.compare import Values, advance, as_trained, beyond, copied, gap, gaps, same_conditions, values
from tiledseg.tracing.record import record
from tiledseg.tracing.trace import is_unit

SIDES = 64, 128, 256  # pixels of a crop: the first at which the module runs in float64
EXACT = 1e-8  # of the largest value: of outputs and gradients in float64
NOISE = 8.0  # times the module's own rounding
ROUNDINGS = 16.0  # of the dtype, of the largest value, whatever the network
TRIES = 2048  # sizes looked at for a legal one
_WIDE = torch.float64.itemsize
_twin = functools.lru_cache(2)(copied)


def verify_first(
    network: GraphNetwork,
    load: Callable[[], torch.Tensor | None],
    mesh: Mesh,
    precision: str,
    most: int,
    say: Callable[[str], None],
) -> None:
    """End the run where a traced network does not give what its module gives on the input that `load` reads. `most`:
    bytes that it may take. Collective.

    Rank 0 looks, the others wait for its one broadcast (`Mesh.on_root`), which carries an error too: nothing can wait
    forever. Only the root calls `load` and `say`.
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
    """Compare a traced network with its module on real input, in the mode in which it is; the line for the log.

    `memory`: bytes that may be taken, `most` of them by activations; of a larger input a part is looked at. Raises
    ConfigError that names the first node that differs.
    """
    begun, name = time.perf_counter(), type(network.recorded.module).__name__
    room = memory - 3 * sum(tensor.numel() * _WIDE for tensor in network.state_dict().values())
    room = room if most is None else min(room, most)
    try:
        _twin(network, False)
    except Exception as error:  # whatever an attribute of the module raises
        return f"not checked: {name} cannot be copied ({type(error).__name__}: {first_line(error)})"
    x_BCHW = x_BCHW.detach()
    window_BCHW = _fitted(network, x_BCHW, room, x_BCHW.element_size())
    while window_BCHW is not None:
        try:
            rounding = _check_crop(network, window_BCHW, room)
            _check_window(network, window_BCHW, room, rounding)
            height, width = window_BCHW.shape[2:]
            part = "" if window_BCHW is x_BCHW else f" (of {x_BCHW.shape[2]} x {x_BCHW.shape[3]})"
            seconds = time.perf_counter() - begun
            return f"checked: the graph gives what {name} gives on {height} x {width} pixels{part}, {seconds:.1f} s"
        except (RuntimeError, MemoryError) as error:
            if not is_exhausted(error):
                raise
            window_BCHW = _fitted(network, window_BCHW, _bytes(network, window_BCHW, 1) // 4, 1)
        finally:
            _twin.cache_clear()
    _twin.cache_clear()
    return f"not checked: no part of {x_BCHW.shape[2]} x {x_BCHW.shape[3]} pixels suits {name} and the free memory"


def _check_crop(network: GraphNetwork, window_BCHW: torch.Tensor, room: int) -> float:
    """Compare in float64, in training with gradients; the rounding of the module in its dtype, relative."""
    backward = network.training and torch.is_grad_enabled()
    for precise in (True, False):  # a module may not run in float64, or not on a small crop
        for side in SIDES:
            crop_BCHW = _crop(window_BCHW, [_least(graph, side, most) for graph, most in _dims(network, window_BCHW)])
            if _bytes(network, crop_BCHW, _WIDE * (3 if backward else 1)) > room:
                break
            try:
                found = _values(network, crop_BCHW, False, precise, backward)  # before a module that writes weights
                expected = _values(network, crop_BCHW, True, precise, backward)
            except Exception as error:  # whatever the module raises
                if is_exhausted(error):
                    raise
                continue
            rounding = _rounding(network, crop_BCHW, expected) if precise else 100 * _epsilon(crop_BCHW)
            relative = EXACT * (1 + 100 * rounding) if precise else 1e4 * _epsilon(crop_BCHW)
            apart = gaps(found, expected)
            if beyond(apart, relative):  # unless the module itself changes as much with the last digits of its input
                moved_BCHW = crop_BCHW.double() if precise else crop_BCHW.clone()
                draw = torch.Generator().manual_seed(1)
                noise = torch.rand(crop_BCHW.shape, generator=draw).to(moved_BCHW)
                moved_BCHW *= 1 + 16 * torch.finfo(moved_BCHW.dtype).eps * noise
                again = gaps(_values(network, moved_BCHW, True, precise, backward), expected)
                slack = {name: 10 * difference for name, (difference, _) in again.items()}
                _refuse(network, crop_BCHW, apart, relative, slack, precise)
            return rounding
    return 100 * _epsilon(window_BCHW)


def _check_window(network: GraphNetwork, window_BCHW: torch.Tensor, room: int, rounding: float) -> None:
    """Compare on a whole window, in the dtype of the run. What looks too much is judged by the rounding of a larger
    crop."""
    try:
        expected = _values(network, window_BCHW, True)
    except Exception as error:  # whatever the module raises
        if is_exhausted(error):
            raise
        raise ConfigError(
            f"{type(network.recorded.module).__name__} does not run on {_size(window_BCHW)} of the data: "
            f"{type(error).__name__}: {first_line(error)}; mend it, or choose another size of tiles"
        ) from error
    apart = gaps(_values(network, window_BCHW, False), expected)
    relative = ROUNDINGS * _epsilon(window_BCHW) + NOISE * rounding
    relative = max(relative, EXACT) if window_BCHW.dtype == torch.float64 else relative
    if not beyond(apart, relative):
        return
    larger_BCHW = _fitted(network, window_BCHW, room, _WIDE)
    if larger_BCHW is not None:
        with contextlib.suppress(Exception):  # a module that does not run in float64
            precise = _values(network, larger_BCHW, True, True)
            relative += NOISE * _rounding(network, larger_BCHW, precise)
    _refuse(network, window_BCHW, apart, relative, {}, False)


def _rounding(network: GraphNetwork, x_BCHW: torch.Tensor, precise: Values) -> float:
    """Return how far the module's outputs in its own dtype are from those in float64, relative to the largest."""
    apart = gaps(_values(network, x_BCHW, True), precise)
    return max(most / max(size, 1e-300) for name, (most, size) in apart.items() if name.startswith("output"))


def _values(
    network: GraphNetwork, x_BCHW: torch.Tensor, of_module: bool, precise: bool = False, backward: bool = False
) -> Values:
    """Run the module, or its graph, on a copy; return its outputs and the state that it leaves behind."""
    return values(_twin(network, precise), x_BCHW, of_module, precise, backward)


def _refuse(
    network: GraphNetwork,
    x_BCHW: torch.Tensor,
    apart: Mapping[str, tuple[float, float]],
    relative: float,
    slack: Mapping[str, float],
    precise: bool,
) -> None:
    """Raise ConfigError for values beyond the bound. Of gradients the last is named, which a backward pass makes
    first."""
    names = beyond(apart, relative, slack)
    if not names:
        return
    outputs = [name for name in names if not name.startswith("gradient")]
    name = outputs[0] if outputs else names[-1]
    most, size = apart[name]
    place = _first_differing(network, x_BCHW, relative, precise) if outputs else "a backward pass of its own, after it"
    mode = " in training" if network.training else ""
    raise ConfigError(
        f"{type(network.recorded.module).__name__} computes{mode} what its graph does not, on {_size(x_BCHW)} of the "
        f"data: {name} differs by {most:.1e} of {size:.1e}; first: {place}; write that in other words, or set verify "
        "to false and answer for the numbers (docs/own-network.md)"
    )


def _first_differing(network: GraphNetwork, x_BCHW: torch.Tensor, relative: float, precise: bool) -> str:
    """The first node whose tensor differs, in words: module and graph run side by side, call by call."""
    module, graph = copied(network, precise), copied(network, precise)
    recorded, found, done = module.recorded, list[str](), 0
    x_BCHW = x_BCHW.to(torch.float64 if precise else x_BCHW.dtype)
    tensors = {0: x_BCHW.clone()}

    def watch(calls: list[Call], parts: list[torch.Tensor]) -> None:
        nonlocal done
        at, call = len(calls) - 1, where(calls[-1])
        known = recorded.calls[at] if at < len(recorded.calls) else ""
        # Without lines: those of a Sequential are its caller's.
        if not found and call.rpartition(", ")[0] != known.rpartition(", ")[0]:
            found.append(f"{call} is called, which was not when it was traced")
        for part, tensor in enumerate(parts):
            node, layout = recorded.made.get(Made(at, part), (-1, None))
            if found or node < done:
                continue
            advance(graph, tensors, done, node + 1)
            done = node + 1
            most, size = gap(to_layout(tensors[done], layout), tensor)
            if not most <= relative * size:
                found.append(f"node '{network.graph.nodes[node].name}' by {most:.1e} of {size:.1e}, {known}")

    with contextlib.suppress(Exception), torch.no_grad(), same_conditions(x_BCHW.device, precise):
        record(as_trained(module), x_BCHW.clone(), is_unit, watch=watch)
    return found[0] if found else "what it returns, or leaves behind, of nodes that agree"


def _dims(network: GraphNetwork, x_BCHW: torch.Tensor) -> list[tuple[Graph, int]]:
    return list(zip((network.graph, network.graph.along_columns), x_BCHW.shape[2:], strict=True))


def _legal(graph: Graph, size: int) -> bool:
    try:
        return output_size(graph, size) > 0
    except GeometryError:
        return False


def _least(graph: Graph, side: int, most: int) -> int:
    """The smallest legal size from `side` to `most`, or `most`, which is legal."""
    return next((size for size in range(min(side, most), most) if _legal(graph, size)), most)


def _fitted(network: GraphNetwork, x_BCHW: torch.Tensor, room: int, width: int) -> torch.Tensor | None:
    """The input, or a legal part of it whose tensors, `width` bytes a number, fill at most `room` bytes; None where
    none does."""
    sizes = list(x_BCHW.shape[2:])
    while min(sizes) > 0:
        near = [
            next((size for size in range(most, max(0, most - TRIES), -1) if _legal(graph, size)), 0)
            for most, (graph, _) in zip(sizes, _dims(network, x_BCHW), strict=True)
        ]
        if min(near) == 0:
            return None
        if _bytes(network, x_BCHW[:, :, : near[0], : near[1]], width) <= room:
            return _crop(x_BCHW, near)
        longer = near.index(max(near))
        sizes[longer], sizes[1 - longer] = near[longer] // 2, near[1 - longer]
    return None


def _bytes(network: GraphNetwork, x_BCHW: torch.Tensor, width: int) -> int:
    """Of all tensors at once, as an author may hold them, and half as much for what kernels need."""
    batch, _, *size = x_BCHW.shape
    shapes = tensor_shapes(network.graph, network.bands, *size)
    return 3 * batch * width * sum(count * rows * cols for count, rows, cols in shapes) // 2


def _crop(x_BCHW: torch.Tensor, size: list[int]) -> torch.Tensor:
    """A part of this size: of nine places that where pixels differ most."""
    if list(x_BCHW.shape[2:]) == size:
        return x_BCHW
    spare = [have - want for have, want in zip(x_BCHW.shape[2:], size, strict=True)]
    places = [(spare[0] * row // 2, spare[1] * col // 2) for row in (1, 0, 2) for col in (1, 0, 2)]
    crops = [x_BCHW[:, :, row : row + size[0], col : col + size[1]] for row, col in dict.fromkeys(places)]
    spread = [float(crop.double().std(dim=(2, 3)).sum().nan_to_num(0.0, 0.0, 0.0)) for crop in crops]
    return crops[spread.index(max(spread))]


def _epsilon(x_BCHW: torch.Tensor) -> float:
    """The rounding of the run's dtype."""
    device = x_BCHW.device.type
    cast = torch.is_autocast_enabled(device)
    return torch.finfo(torch.get_autocast_dtype(device) if cast else x_BCHW.dtype).eps


def _size(x_BCHW: torch.Tensor) -> str:
    return f"{x_BCHW.shape[2]} x {x_BCHW.shape[3]} pixels"
