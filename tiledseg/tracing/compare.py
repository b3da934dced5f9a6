"""Comparison of a module and its graph on the same images: outputs, gradients, and state afterwards.

`trace` compares them on noise, and a run compares them on its first real input, on copies and with the random number
generators set back. A run compares a crop in float64, with gradients in training, and a whole window in its dtype. The
tolerance grows by the change of the module's own output when the last digits of its input change. Dropout keeps and
scales all channels in both."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tiledseg.comm.doing import doing
from tiledseg.comm.mesh import Mesh
from tiledseg.errors import ConfigError, first_line
from tiledseg.execution.carrying import autocast, network_input
from tiledseg.execution.halo_modes import Part
from tiledseg.execution.memory import free_memory
from tiledseg.geometry.shapes import is_legal_size, tensor_shapes
from tiledseg.geometry.tiling import Tiling
from tiledseg.memory.allocations import is_exhausted
from tiledseg.models.dropout import set_dropout_key
from tiledseg.models.layers.pixelwise import to_layout
from tiledseg.models.layers.pooling import average_pool
from tiledseg.models.network import GraphNetwork, Tensors, run_nodes
from tiledseg.raster.samples.dataset import Dataset
from tiledseg.system.console import counted
from tiledseg.tracing.calls import Call, Made, function_name, tensors_of, where
from tiledseg.tracing.record import record
from tiledseg.tracing.runs import Images
from tiledseg.tracing.state import drawn_from, in_mode, kept_state

LARGE = 1000.0  # pixels are 0 to 10,000
OUTPUTS = {torch.float64: 1e-11, torch.float32: 2e-5}  # tolerances while tracing, of the largest value
GRADIENTS = {torch.float64: 1e-9, torch.float32: 1e-3}
COARSE = 2e-2  # for other dtypes
SIDES = 80, 256, 1024  # most pixels of a crop's side: the first that the module runs on is used
SHARES = 1, 2, 4, 8, 16, 32  # of the sides of a window: the first that fits in memory is compared
EXACT = 1e-8  # tolerance in a run in float64, of the largest value
ROUNDINGS = 16.0  # tolerance in a run in another dtype, of the largest value, in units of the dtype's epsilon
SECONDS = 1.0  # most time of comparing calls for images of other sizes
TRIES = 2048  # sides that the search for a legal one tries

Say = Callable[[str], None]
Values = dict[str, torch.Tensor]  # 'output 0', "state 'norm.running_mean'", "gradient 'head.weight'"
Gaps = dict[str, tuple[float, float]]  # of each value: its largest difference, and the module's largest number


def values(
    twin: GraphNetwork, x_BCHW: torch.Tensor, of_module: bool, precise: bool, backward: bool, unwatched: bool = False
) -> Values:
    """Return the outputs of the module (`of_module`) or of its graph, the state afterwards, and gradients (`backward`).
    `precise`: in float64. `unwatched`: under no mode of torch, since a module may detect a mode."""
    module: nn.Module = twin.recorded.module
    x_BCHW = x_BCHW.to(torch.float64 if precise else x_BCHW.dtype, copy=True).requires_grad_(backward)
    conditions = drawn_from(0) if unwatched else same_conditions(x_BCHW.device, precise)
    with conditions, torch.set_grad_enabled(backward), kept_state(module, False):
        held = x_BCHW.clone() if backward else x_BCHW  # the module may write over it
        if of_module:
            outputs = tensors_of(as_trained(twin)(held))
            outputs = outputs if twin.recorded.wanted is None else [outputs[k] for k in twin.recorded.wanted]
        else:
            tensors = {0: held}
            advance(twin, tensors, 0, len(twin.graph))
            outputs = [tensors[result] for result in twin.graph.results]
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        made = {f"output {number}": output.detach() for number, output in enumerate(outputs)}
        made |= {f"state '{name}'": tensor.detach().clone() for name, tensor in state.items()}
        if backward:
            draw = torch.Generator().manual_seed(2)
            weights = [torch.randn(output.shape, generator=draw, dtype=torch.float64).to(output) for output in outputs]
            loss = sum(((y * weight).sum() for y, weight in zip(outputs, weights, strict=True)), 0.0 * x_BCHW.sum())
            leaves = {"input": x_BCHW, **{name: p for name, p in module.named_parameters() if p.requires_grad}}
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            made |= {f"gradient '{name}'": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return made


def differences(
    twin: GraphNetwork, x_BCHW: torch.Tensor, relative: float, precise: bool, backward: bool, epsilon: float = 0.0
) -> Gaps:
    """Return the values in which a module and its graph differ by more than `relative` of the value's size. `epsilon`:
    rounding of the input; ten times the change that it makes in the module's own value is tolerated too."""
    x_BCHW = x_BCHW.double() if precise else x_BCHW
    by_graph = values(twin, x_BCHW, False, precise, backward)  # first: the module may write its weights
    by_module = values(twin, x_BCHW, True, precise, backward)
    missing = torch.empty(0)  # in the place of an output that the graph does not have
    gaps = {name: gap(by_graph.get(name, missing), tensor) for name, tensor in by_module.items()}
    apart = _beyond(gaps, relative, {})
    if apart and epsilon:
        noise_BCHW = torch.rand(x_BCHW.shape, generator=torch.Generator().manual_seed(1)).to(x_BCHW)
        moved_BCHW = x_BCHW + epsilon * (float(x_BCHW.abs().nan_to_num().max()) or 1.0) * noise_BCHW
        moved = values(twin, moved_BCHW, True, precise, backward)
        apart = _beyond(apart, relative, {name: 10 * gap(moved[name], by_module[name])[0] for name in apart})
    return apart


def gap(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the largest number of the second, over its finite numbers."""
    if value.shape != reference.shape or not reference.numel():
        return (inf if value.shape != reference.shape else 0.0), 1.0
    reference, is_finite = reference.double(), reference.isfinite()
    both = (value.double() - reference).abs_().nan_to_num_(inf, inf), reference.abs()
    apart, size = (float(each.where(is_finite, 0.0).max()) for each in both)
    return apart, size


def _beyond(apart: Gaps, relative: float, slack: dict[str, float]) -> Gaps:
    """Return the gaps above `relative` of the value's size (at least 1e-4 of its kind's largest) plus its `slack`."""
    kinds = {name: name.partition(" ")[0] for name in apart}
    largest = {kind: max(apart[name][1] for name in apart if kinds[name] == kind) for kind in set(kinds.values())}
    bounds = {name: relative * max(size, 1e-4 * largest[kinds[name]]) for name, (_, size) in apart.items()}
    return {name: pair for name, pair in apart.items() if not pair[0] <= bounds[name] + slack.get(name, 0.0)}


def copied(network: GraphNetwork, precise: bool) -> GraphNetwork:
    """Return a copy with weights, buffers and attributes of its own, in float64 if `precise`; offload is not copied."""
    twin = copy.deepcopy(network, {id(network._offload): None})
    set_dropout_key(twin)
    return twin.double() if precise else twin


def as_trained(twin: GraphNetwork) -> nn.Module:
    """Return the module in the network's mode; its norms in evaluation if the graph's statistics are constants."""
    module: nn.Module = twin.recorded.module
    module.training = twin.training  # its parts are the network's
    norms = [layer.is_still for layer in twin.graph.layers if layer.tracks or layer.is_still]
    if norms and all(norms):
        for part in module.modules():
            part.training &= getattr(part, "running_mean", None) is None
    return module


def advance(twin: GraphNetwork, tensors: Tensors, first: int, stop: int) -> None:
    """Run the nodes `first` to `stop` - 1 of the graph on `tensors`."""
    modules = list(twin.layers.values())
    run_nodes(twin.graph, lambda k, inputs: modules[k](*inputs), tensors, first, stop)


@contextlib.contextmanager
def same_conditions(device: torch.device, precise: bool) -> Iterator[None]:
    """Seed generators, let dropout keep all, allow nondeterministic kernels, and disable autocast if `precise`."""
    mode = torch.get_deterministic_debug_mode()
    cast = torch.autocast(device.type, enabled=False) if precise else contextlib.nullcontext()
    with drawn_from(0), _KeepAll(precise), cast:
        torch.set_deterministic_debug_mode("default")
        try:
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)


class _KeepAll(TorchFunctionMode):
    """A mode of torch in which dropout keeps and scales all channels, pooling is right on a GPU, and norms are right on
    a CPU (`weighted.corrected`). `precise`: float64 tensors stay so where the module casts them to float32."""

    def __init__(self, precise: bool) -> None:
        super().__init__()
        self._precise = precise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function_name(func) == "avg_pool2d":
            return average_pool(*args, **kwargs)
        if function_name(func) in ("group_norm", "batch_norm") and args:
            args = args[0].contiguous(), *args[1:]
        if self._precise and function_name(func) == "float" and args[0].dtype == torch.float64:
            return args[0]
        if function_name(func) in ("bernoulli_", "rand"):  # of stochastic depth
            return args[0].fill_(1) if function_name(func) == "bernoulli_" else torch.ones(*args, **kwargs)
        if function_name(func).rstrip("_") not in ("dropout", "dropout2d", "feature_dropout"):
            return func(*args, **kwargs)
        p, training = (*args, *(0.5, True)[len(args) - 1 :])[1:3]
        p, training = kwargs.get("p", p), kwargs.get("training", kwargs.get("train", training))
        x = args[0] if args else kwargs["input"]
        return x * ((1 / (1 - p) if p < 1 else 0.0) if training else 1.0)


def check_traced(network: GraphNetwork, probes: Sequence[torch.Tensor], still: bool) -> None:
    """Compare a new graph with its module on these images, small and large. Raise ConfigError where outputs differ, or
    gradients of a module in training. In evaluation, other gradients make a network that only maps."""
    trains = network.recorded.module.training
    with in_mode(network, False):
        twin, precise = network, False
        with contextlib.suppress(Exception):  # whatever a module raises that is copied, or run in float64
            wide = copied(network, True)
            made = values(wide, probes[-1], True, True, False).values()
            precise = all(y.dtype == torch.float64 or not y.is_floating_point() for y in made)  # counts stay integers
        with contextlib.suppress(Exception):  # a module that cannot be copied is compared as it is
            twin = wide if precise else copied(network, False)
        dtype = torch.float64 if precise else probes[-1].dtype
        for x_BCHW in (*probes, LARGE * probes[-1]):
            try:
                apart = differences(twin, x_BCHW, OUTPUTS.get(dtype, COARSE), precise, False)
            except Exception as error:  # a function that takes other things than it was thought to
                what = f"the module's graph does not run: {type(error).__name__}: {first_line(error)}"
                raise ConfigError(f"{what}; write that function in other words, and please report it") from error
            for diff, size in apart.values():
                what = f"the module's graph gives outputs that differ from the module's by {diff:.1e} of {size:.1e}"
                raise ConfigError(f"{what} for {tuple(x_BCHW.shape)}; write in other words what was not seen")
        unwatched, watched = (values(twin, probes[-1], True, precise, False, each) for each in (True, False))
        bound = OUTPUTS[torch.float32] if precise else COARSE
        if _beyond({name: gap(unwatched[name], tensor) for name, tensor in watched.items()}, bound, {}):
            raise ConfigError("the module computes something else where its calls are watched; leave that out")
        for training in () if network.own_gradients else (False, True):
            if training and (still or network.untrained or not trains):
                return
            twin.train(training)
            try:
                apart = differences(twin, probes[0], GRADIENTS.get(dtype, COARSE), precise, True)
                reason = f"{next(iter(apart))} is another than the graph's" if apart else None
            except RuntimeError as error:  # such as a function without a derivative
                reason = f"it has no gradients: {first_line(error)}"
            if reason and trains:
                raise ConfigError(f"the module cannot be trained on tiles: {reason}; map with module.eval()")
            if reason:
                network.own_gradients = network.untrained = reason
                return


def holds_anywhere(network: GraphNetwork, x_BCHW: torch.Tensor) -> bool:
    """Return True if graph and module agree for an image of any size, or the module does not run on it."""
    with in_mode(network, False):
        try:
            values(network, x_BCHW, True, False, False)
        except Exception:  # whatever the module raises
            return True
        with contextlib.suppress(Exception):  # sizes that do not join
            return not differences(network, x_BCHW, OUTPUTS.get(x_BCHW.dtype, COARSE), False, False)
        return False


def verify_first(
    network: GraphNetwork,
    dataset: Dataset,
    parts: Sequence[Part],
    tilings: Sequence[Tiling],
    mesh: Mesh,
    precision: str,
    most: int,
    say: Say,
) -> None:
    """Run `verified` on rank 0, for the first of its `parts` and the images of `tilings`. Collective: other ranks wait
    for one broadcast, which carries an error too."""

    def look() -> str:
        if not parts:
            return "not checked: the first rank computes nothing"
        sample = dataset.load(parts[0].image, parts[0].tile, draw=parts[0].draw)
        device = next(network.recorded.module.parameters(), torch.zeros(())).device
        wholes = [(1, tiling.whole.shape) for tiling in tilings]
        with autocast(precision, device):
            return verified(network, network_input(sample, device), free_memory(mesh, device), most, wholes)

    with doing("comparing the network with what was traced of it"):
        line = mesh.on_root(look)
    if mesh.is_root:
        say(line)


def verified(
    network: GraphNetwork, x_BCHW: torch.Tensor, memory: int, most: int | None = None, wholes: Sequence[Images] = ()
) -> str:
    """Compare a traced network with its module on real input, and the module's calls there and for `wholes`. Return a
    line for the log. Raise ConfigError that names the first difference. Uses at most `memory` bytes, of which at most
    `most` hold activations."""
    begun, name = time.perf_counter(), type(network.recorded.module).__name__
    room = memory - 3 * sum(tensor.numel() * torch.float64.itemsize for tensor in network.state_dict().values())
    room = room if most is None else min(room, most)
    try:
        twin = copied(network, False)
    except Exception as error:  # whatever an attribute of the module raises
        return f"not checked: {name} cannot be copied ({type(error).__name__}: {first_line(error)})"
    x_BCHW = x_BCHW.detach()
    for share in SHARES:
        window_BCHW = _legal_crop(network, x_BCHW, [n // share for n in x_BCHW.shape[2:]])
        if window_BCHW is None or _bytes(network, window_BCHW) > room:
            continue
        try:
            _check(network, twin, window_BCHW, room)
        except (RuntimeError, MemoryError) as error:
            if not is_exhausted(error):
                raise
            continue
        part = "" if window_BCHW.shape == x_BCHW.shape else f" (of {x_BCHW.shape[2]} x {x_BCHW.shape[3]})"
        images = [*sorted(wholes, key=lambda each: -prod(each[1])), (len(x_BCHW), tuple(x_BCHW.shape[2:]))]
        looks = network.recorded.check(network, images, SECONDS)
        line = f"checked: the graph gives what {name} gives on {_size(window_BCHW)}{part}"
        line += f", and {name} makes the same calls at {counted(looks, 'further size')}" * (looks > 0)
        return f"{line}, {time.perf_counter() - begun:.1f} s"
    return f"not checked: no part of {_size(x_BCHW)} suits {name} and the free memory"


def _check(network: GraphNetwork, twin: GraphNetwork, window_BCHW: torch.Tensor, room: int) -> None:
    """Compare on a crop in float64 (in the run's dtype if the module does not run in float64), in training with
    gradients; then by `twin` on the whole window, in the run's dtype. Raise ConfigError that names the first
    difference. It is the last of the gradients, which a backward pass makes first."""
    trains, compared, precise_twin = network.training and torch.is_grad_enabled(), False, copied(network, True)
    cast = torch.is_autocast_enabled(kind := window_BCHW.device.type)
    epsilon = torch.finfo(torch.get_autocast_dtype(kind) if cast else window_BCHW.dtype).eps
    module_name = type(network.recorded.module).__name__
    crops = ((precise, _legal_crop(network, window_BCHW, (side, side))) for precise in (True, False) for side in SIDES)
    for precise, x_BCHW in (*crops, (False, window_BCHW)):
        is_crop = x_BCHW is not window_BCHW
        if x_BCHW is None or (is_crop and compared):
            continue
        if is_crop:
            if _bytes(network, x_BCHW, torch.float64.itemsize * (3 if trains else 1)) > room:
                continue
            bound = EXACT if precise else 1e4 * epsilon
            rounding = 16 * torch.finfo(torch.float64 if precise else x_BCHW.dtype).eps
        else:
            bound = EXACT if x_BCHW.dtype == torch.float64 else ROUNDINGS * epsilon
            rounding = 4 * epsilon
        try:
            by = precise_twin if precise else twin
            apart = differences(by, x_BCHW, bound, precise, trains and is_crop, epsilon=rounding)
        except Exception as error:  # whatever the module raises, in float64 or on a small crop
            if is_exhausted(error):
                raise
            if is_crop:
                continue
            what = f"{module_name} does not run on {_size(x_BCHW)} of the data: {type(error).__name__}"
            raise ConfigError(f"{what}: {first_line(error)}; mend it, or choose another size of tiles") from error
        compared = True
        if apart:
            outputs = [name for name in apart if not name.startswith("gradient")]
            name, place = outputs[0] if outputs else list(apart)[-1], "a backward pass of its own, after it"
            place = _first_differing(network, x_BCHW, bound, precise) if outputs else place
            difference, size = apart[name]
            mode = " in training" if network.training else ""
            what = f"{module_name} computes{mode} what its graph does not, on {_size(x_BCHW)} of the data"
            remedy = "write that in other words, or set verify to false (docs/explanation/exactness.md)"
            raise ConfigError(f"{what}: {name} differs by {difference:.1e} of {size:.1e}; first: {place}; {remedy}")


def _first_differing(network: GraphNetwork, x_BCHW: torch.Tensor, relative: float, precise: bool) -> str:
    """Return in words the first node whose tensor differs, by running module and graph side by side, call by call."""
    module, graph = copied(network, precise), copied(network, precise)
    recorded, places, done = module.recorded, list[str](), 0
    x_BCHW = x_BCHW.to(torch.float64 if precise else x_BCHW.dtype)
    tensors = {0: x_BCHW.clone()}

    def watch(calls: list[Call], parts: list[torch.Tensor]) -> None:
        nonlocal done
        at, call = len(calls) - 1, where(calls[-1])
        traced = recorded.calls[at] if at < len(recorded.calls) else ""
        # Compare without line numbers: a module inside a Sequential has its caller's.
        if not places and call.rpartition(", ")[0] != traced.rpartition(", ")[0]:
            places.append(f"{call} is called, which was not when it was traced")
        for part, tensor in enumerate(parts):
            node, layout = recorded.made.get(Made(at, part), (-1, None))
            if places or node < done:
                continue
            advance(graph, tensors, done, node + 1)
            done = node + 1
            difference, size = gap(to_layout(tensors[done], layout), tensor)
            if not difference <= relative * size:
                places.append(f"node '{network.graph.nodes[node].name}' by {difference:.1e} of {size:.1e}, {traced}")

    with contextlib.suppress(Exception), torch.no_grad(), same_conditions(x_BCHW.device, precise):
        record(as_trained(module), x_BCHW.clone(), watch=watch)
    return places[0] if places else "what it returns, or leaves behind, of nodes that agree"


def _legal_crop(network: GraphNetwork, x_BCHW: torch.Tensor, most: Sequence[int]) -> torch.Tensor | None:
    """Return the largest legal view of an image's middle, of at most `most` rows and columns; None without one."""
    tried = (range(min(pair), max(0, min(pair) - TRIES), -1) for pair in zip(most, x_BCHW.shape[2:], strict=True))
    rows, cols = (next((n for n in each if is_legal_size(network.graph, n)), 0) for each in tried)
    if not rows or not cols:
        return None
    top, left = (x_BCHW.shape[2] - rows) // 2, (x_BCHW.shape[3] - cols) // 2
    return x_BCHW[:, :, top : top + rows, left : left + cols]


def _bytes(network: GraphNetwork, x_BCHW: torch.Tensor, width: int | None = None) -> int:
    """Return the bytes of all tensors of the graph at once, and half as much for workspaces of kernels."""
    batch, _, *size = x_BCHW.shape
    shapes = tensor_shapes(network.graph, network.bands, *size)
    return 3 * batch * (width or x_BCHW.element_size()) * sum(count * rows * cols for count, rows, cols in shapes) // 2


def _size(x_BCHW: torch.Tensor) -> str:
    return f"{x_BCHW.shape[2]} x {x_BCHW.shape[3]} pixels"
