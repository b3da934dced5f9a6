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
from dataclasses import replace
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
from tiledseg.models.network import GraphNetwork
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
TRIES = 2048  # sides that the search for a legal one tries
SECONDS = 1.0  # most time of comparing calls for images of other sizes

Values = dict[str, torch.Tensor]  # 'output 0', "state 'norm.running_mean'", "gradient 'head.weight'"
Gaps = dict[str, tuple[float, float]]  # of each value: its largest difference, and the module's largest number


def values(
    twin: GraphNetwork, x_BCHW: torch.Tensor, of_module: bool, backward: bool = False, unwatched: bool = False
) -> Values:
    """Return the outputs of the module (`of_module`) or of its graph, the state afterwards, and gradients (`backward`).
    `unwatched`: under no mode of torch, since a module may detect a mode."""
    module: nn.Module = twin.recorded.module
    x_BCHW = x_BCHW.clone().requires_grad_(backward)
    conditions = drawn_from(0) if unwatched else same_conditions(x_BCHW, twin.recorded.is_wide)
    with conditions, torch.set_grad_enabled(backward), kept_state(module, False):
        held = x_BCHW.clone() if backward else x_BCHW  # the module may write over it
        if of_module:
            outputs = tensors_of(as_trained(twin)(held))
            outputs = outputs if twin.recorded.wanted is None else [outputs[k] for k in twin.recorded.wanted]
        else:
            tensors = {0: held}
            twin.run_nodes(tensors, 0, len(twin.graph))
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
    twin: GraphNetwork, x_BCHW: torch.Tensor, relative: float, backward: bool = False, epsilon: float = 0.0
) -> Gaps:
    """Return the values in which a module and its graph differ by more than `relative` of the value's size. `epsilon`:
    rounding of the input; ten times the change that it makes in the module's own value is tolerated too."""
    by_graph = values(twin, x_BCHW, False, backward)  # first: the module may write its weights
    by_module = values(twin, x_BCHW, True, backward)
    missing = torch.empty(0)  # in the place of an output that the graph does not have
    gaps = {name: gap(by_graph.get(name, missing), tensor) for name, tensor in by_module.items()}
    apart = _beyond(gaps, relative, {})
    if apart and epsilon:
        noise_BCHW = torch.rand(x_BCHW.shape, generator=torch.Generator().manual_seed(1)).to(x_BCHW)
        moved_BCHW = x_BCHW + epsilon * (float(x_BCHW.abs().nan_to_num().max()) or 1.0) * noise_BCHW
        moved = values(twin, moved_BCHW, True, backward)
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
    """Return a copy with tensors and attributes of its own, which keeps all activations; in float64 if `precise`."""
    twin = copy.deepcopy(network, {id(network._offload): None})
    twin.graph, twin.recorded = replace(twin.graph, memory=None), replace(twin.recorded, is_wide=precise)
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


@contextlib.contextmanager
def same_conditions(x_BCHW: torch.Tensor, is_wide: bool) -> Iterator[None]:
    """Seed generators, let dropout keep all, allow nondeterministic kernels; if `is_wide` disable autocast."""
    mode = torch.get_deterministic_debug_mode()
    cast = torch.autocast(x_BCHW.device.type, enabled=False) if is_wide else contextlib.nullcontext()
    with drawn_from(0), _KeepAll(is_wide), cast, contextlib.ExitStack() as after:
        after.callback(torch.set_deterministic_debug_mode, mode)
        torch.set_deterministic_debug_mode("default")
        yield


def _keep_all(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> torch.Tensor:
    """Keep and scale all channels, with the arguments of torch's functions of dropout."""
    return input * ((1 / (1 - p) if p < 1 else 0.0) if training and train else 1.0)


_DROPOUTS = "dropout dropout2d feature_dropout dropout_ dropout2d_ feature_dropout_"
INSTEAD: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(_DROPOUTS.split(), _keep_all),
    **{"bernoulli_": lambda x, *_, **__: x.fill_(1), "rand": torch.ones},  # of stochastic depth
    "avg_pool2d": average_pool,
}


class _KeepAll(TorchFunctionMode):
    """A mode of torch in which dropout keeps and scales all channels, pooling is right on a GPU, and norms are right on
    a CPU (`weighted.corrected`). `is_wide`: float64 tensors stay so where the module casts them to float32."""

    def __init__(self, is_wide: bool) -> None:
        super().__init__()
        self._is_wide = is_wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_name(func)
        if self._is_wide and name == "float" and args[0].dtype == torch.float64:
            return args[0]
        if name in ("group_norm", "batch_norm") and args:
            args = args[0].contiguous(), *args[1:]
        return INSTEAD.get(name, func)(*args, **kwargs or {})


def check_traced(network: GraphNetwork, probes: Sequence[torch.Tensor], still: bool) -> None:
    """Compare a new graph with its module on these images, small and large. Raise ConfigError where outputs differ, or
    gradients of a module in training. In evaluation, other gradients make a network that only maps."""
    trains, twin = network.recorded.module.training, network
    with in_mode(network, False):
        with contextlib.suppress(Exception):  # whatever a module raises that is copied, or run in float64
            wide, wide_probes = copied(network, True), [x_BCHW.double() for x_BCHW in probes]
            made = values(wide, wide_probes[-1], True).values()
            if all(y.dtype == torch.float64 or not y.is_floating_point() for y in made):  # counts stay integers
                twin, probes = wide, wide_probes
        with contextlib.suppress(Exception):  # a module that cannot be copied is compared as it is
            twin = copied(network, False) if twin is network else twin
        dtype = probes[-1].dtype
        for x_BCHW in (*probes, LARGE * probes[-1]):
            try:
                apart = differences(twin, x_BCHW, OUTPUTS.get(dtype, COARSE))
            except Exception as error:  # a function that takes other things than it was thought to
                what = f"the module's graph does not run: {type(error).__name__}: {first_line(error)}"
                raise ConfigError(f"{what}; write that function in other words, and please report it") from error
            for diff, size in apart.values():
                what = f"the module's graph gives outputs that differ from the module's by {diff:.1e} of {size:.1e}"
                raise ConfigError(f"{what} for {tuple(x_BCHW.shape)}; write in other words what was not seen")
        unwatched, watched = (values(twin, probes[-1], True, unwatched=each) for each in (True, False))
        bound = OUTPUTS[torch.float32] if dtype == torch.float64 else COARSE
        if _beyond({name: gap(unwatched[name], tensor) for name, tensor in watched.items()}, bound, {}):
            raise ConfigError("the module computes something else where its calls are watched; leave that out")
        for training in () if network.own_gradients else (False, True):
            if training and (still or network.untrained or not trains):
                return
            twin.train(training)
            try:
                apart = differences(twin, probes[0], GRADIENTS.get(dtype, COARSE), True)
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
    runs = False
    with in_mode(network, False), contextlib.suppress(Exception):  # whatever the module raises; sizes that do not join
        runs = bool(values(network, x_BCHW, True))
        return not differences(network, x_BCHW, OUTPUTS.get(x_BCHW.dtype, COARSE))
    return not runs


def verify_first(
    network: GraphNetwork,
    dataset: Dataset,
    parts: Sequence[Part],
    tilings: Sequence[Tiling],
    mesh: Mesh,
    precision: str,
    most: int,
    say: Callable[[str], None],
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
    network: GraphNetwork, x_BCHW: torch.Tensor, memory: int, most: float = inf, wholes: Sequence[Images] = ()
) -> str:
    """Compare a traced network with its module on real input, and the module's calls there and for `wholes`. Return a
    line for the log. Raise ConfigError that names the first difference. Uses at most `memory` bytes, of which at most
    `most` hold activations."""
    begun, name = time.perf_counter(), type(network.recorded.module).__name__
    doubles = sum(tensor.numel() for tensor in network.state_dict().values())
    room = min(memory - 3 * doubles * torch.float64.itemsize, most)
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


def _check(network: GraphNetwork, twin: GraphNetwork, window_BCHW: torch.Tensor, room: float) -> None:
    """Compare on a crop in float64 (in the run's dtype if the module does not run in float64), in training with
    gradients; then by `twin` on the whole window, in the run's dtype. Raise ConfigError that names the first
    difference. It is the last of the gradients, which a backward pass makes first."""
    trains, compared, wide = network.training and torch.is_grad_enabled(), False, copied(network, True)
    cast = torch.is_autocast_enabled(kind := window_BCHW.device.type)
    epsilon = torch.finfo(torch.get_autocast_dtype(kind) if cast else window_BCHW.dtype).eps
    name = type(network.recorded.module).__name__
    crops = [crop for side in SIDES if (crop := _legal_crop(network, window_BCHW, (side, side))) is not None]
    of_wide = [(wide, x_BCHW.double()) for x_BCHW in crops]
    for by, x_BCHW in (*of_wide, *((twin, each_BCHW) for each_BCHW in (*crops, window_BCHW))):
        is_crop, is_double = x_BCHW is not window_BCHW, x_BCHW.dtype == torch.float64
        if is_crop and (compared or _bytes(network, x_BCHW, torch.float64.itemsize * (3 if trains else 1)) > room):
            continue
        bound = EXACT if is_double else (1e4 if is_crop else ROUNDINGS) * epsilon
        rounding = 16 * torch.finfo(x_BCHW.dtype).eps if is_crop else 4 * epsilon
        try:
            apart = differences(by, x_BCHW, bound, trains and is_crop, rounding)
        except Exception as error:  # whatever the module raises, in float64 or on a small crop
            if is_exhausted(error):
                raise
            if is_crop:
                continue
            what = f"{name} does not run on {_size(x_BCHW)} of the data: {type(error).__name__}"
            raise ConfigError(f"{what}: {first_line(error)}; mend it, or choose another size of tiles") from error
        compared = True
        if apart:
            outputs = [value for value in apart if not value.startswith("gradient")]
            value, place = outputs[0] if outputs else list(apart)[-1], "a backward pass of its own, after it"
            place = _first_differing(by, x_BCHW, bound) if outputs else place
            difference, size = apart[value]
            mode = " in training" if network.training else ""
            what = f"{name} computes{mode} what its graph does not, on {_size(x_BCHW)} of the data"
            remedy = "write that in other words, or set verify to false (docs/explanation/exactness.md)"
            raise ConfigError(f"{what}: {value} differs by {difference:.1e} of {size:.1e}; first: {place}; {remedy}")


def _first_differing(twin: GraphNetwork, x_BCHW: torch.Tensor, relative: float) -> str:
    """Return in words the first node whose tensor differs, by running module and graph side by side, call by call."""
    module, graph = (copied(twin, twin.recorded.is_wide) for _ in range(2))
    recorded, places, done = module.recorded, list[str](), 0
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
            graph.run_nodes(tensors, done, node + 1)
            done = node + 1
            difference, size = gap(to_layout(tensors[done], layout), tensor)
            if not difference <= relative * size:
                places.append(f"node '{graph.graph.nodes[node].name}' by {difference:.1e} of {size:.1e}, {traced}")

    with contextlib.suppress(Exception), torch.no_grad(), same_conditions(x_BCHW, module.recorded.is_wide):
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
