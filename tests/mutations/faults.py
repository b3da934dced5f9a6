"""Faults to put into the library on purpose, and the tests that must catch each of them.

A fault replaces one piece of a file of `tiledseg/`. `ranks`: 1 runs the tests without mpirun.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A piece of code, its replacement, and the tests that fail with it."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    ranks: int = 1


# Streams and memory of a GPU, on the pretend one: a race, a failure, or values other than a CPU's.
ON_A_GPU = (
    ("a lane does not wait for computing", "memory/host.py", "lane.wait_stream(stream)", "pass"),
    ("computing does not wait for a copy in", "memory/host.py", "stream.wait_event(event)", "pass"),
    ("a step does not wait for its input", "execution/carrying.py", "stream.wait_event(self.event)", "pass"),
    ("an input's memory is given out early", "execution/carrying.py", "tensor.record_stream(stream)", "pass"),
    ("a map is taken before it is there", "inference/mapping.py", "self.sent.synchronize()", "pass"),
    (
        "a checkpoint is written before it is there",
        "training/saving.py",
        "torch.cuda.synchronize(device)",
        "pass",
    ),
    (
        "a validation reads before its sums are there",
        "training/validation.py",
        "torch.cuda.current_stream(device).synchronize()",
        "pass",
    ),
    (
        "a table stays on the host",
        "models/sending.py",
        '    if device.type != "cuda":\n        return tensor.to(device)',
        "    return tensor",
    ),
    ("a tensor is pinned and not whole", "models/sending.py", "return pinned.copy_(tensor).to(", "return pinned.to("),
)
ON_TWO_GPUS = (
    ("a reader takes the first GPU", "execution/carrying.py", "torch.cuda.device(stream.device), ", ""),
    (
        "a message is staged asynchronously",
        "comm/point_to_point.py",
        "buffer.copy_(as_bytes(tensor))",
        "buffer.copy_(as_bytes(tensor), non_blocking=True)",
    ),
    ("nobody waits for NCCL", "comm/transport_torch.py", "            work.wait()", "            pass"),
)

FAULTS = (
    # Geometry: halos, phases, cores.
    Fault(
        "the halo is one alignment short",
        "geometry/halo.py",
        "width = round_up(max(before, after), alignment)",
        "width = round_up(max(before, after), alignment) - alignment",
        "tests/geometry/test_halo.py",
    ),
    Fault(
        "the exact halo forgets the pixels after a core",
        "geometry/halo.py",
        "max(need.stop - core.stop for core, need in needs)",
        "max(need.stop - core.stop for core, need in needs) - 1",
        "tests/geometry/test_halo.py",
    ),
    Fault(
        "the paper's formula loses its - 1",
        "geometry/halo.py",
        "(3 * 2.0 ** (levels - 2) - 1)",
        "(3 * 2.0 ** (levels - 2))",
        "tests/geometry/test_halo.py",
    ),
    Fault(
        "a halo that is too small is accepted",
        "geometry/halo.py",
        "if halo is not None and exact and halo < minimum:",
        "if halo is not None and exact and halo < minimum - 8:",
        "tests/geometry/test_halo.py",
    ),
    Fault(
        "tile edges leave the pooling phase",
        "geometry/tiling.py",
        "edges = [i * units // parts * footprint.alignment for i in range(parts + 1)]",
        "edges = [i * units * footprint.alignment // parts for i in range(parts + 1)]",
        "tests/geometry/test_tiling.py",
    ),
    Fault(
        "a context is not clipped at the raster's end",
        "geometry/tiling.py",
        "clipped = context.clip(extended)",
        "clipped = context",
        "tests/geometry/test_tiling.py",
    ),
    Fault(
        "a convolution reads one pixel less",
        "geometry/layers/convolutions.py",
        "return Interval(start, start + (out.size - 1) * stride + reach + 1)",
        "return Interval(start, start + (out.size - 1) * stride + reach)",
        "tests/geometry/test_receptive_field.py tests/geometry/test_halo.py",
    ),
    Fault(
        "a dilated kernel counts as a dense one",
        "geometry/layers/convolutions.py",
        "return self.stride, self.padding, self.dilation * (self.kernel - 1)",
        "return self.stride, self.padding, self.kernel - 1",
        "tests/geometry/test_receptive_field.py tests/geometry/test_halo.py",
    ),
    Fault(
        "a rank is sent the wrong part of a window",
        "geometry/sharing/decomposition.py",
        "if (part := owned.clip(window)).size",
        "if (part := owned.clip(windows[peer - 1])).size",
        "tests/geometry/test_decomposition.py",
    ),
    Fault(
        "blocks of ranks are cut beside the tiles' edges",
        "geometry/sharing/decomposition.py",
        "return range(block * tiles // parts, (block + 1) * tiles // parts)",
        "return range(-(-block * tiles // parts), -(-(block + 1) * tiles // parts))",
        "tests/geometry/test_decomposition.py",
    ),
    # Halo exchange and spatial layers.
    Fault(
        "halo gradients replace their owner's in place of being added",
        "spatial/halo_exchange.py",
        "part(self.made_BCHW, patch).add_(strip_BCHW)",
        "part(self.made_BCHW, patch).copy_(strip_BCHW)",
        "tests/spatial/test_halo_exchange.py",
        2,
    ),
    Fault(
        "a gradient of what others read is lost",
        "spatial/halo_exchange.py",
        "for patch, strip_BCHW in self.arriving:\n            part(self.made_BCHW, patch).add_(strip_BCHW)",
        "for patch, strip_BCHW in self.arriving[1:]:\n            part(self.made_BCHW, patch).add_(strip_BCHW)",
        "tests/spatial/test_halo_exchange.py",
        2,
    ),
    Fault(
        "max pooling is padded with zeros at the image's end",
        "spatial/twins.py",
        'fill=float("-inf")',
        "fill=0.0",
        "tests/spatial/test_layers.py tests/spatial/test_convert.py",
        2,
    ),
    Fault(
        "average pooling counts padding that the layer does not",
        "spatial/twins.py",
        "divisor = 1 if inside_only else module.divisor_override",
        "divisor = None if inside_only else module.divisor_override",
        "tests/spatial/test_layers.py tests/spatial/test_convert.py",
        2,
    ),
    Fault(
        "moments of ranks are merged without their counts",
        "models/normalise.py",
        "return Statistics(*merge(counts, means, variances), counts.sum(0))",
        "return Statistics(*merge(torch.ones_like(counts), means, variances), counts.sum(0))",
        "tests/spatial/test_layers.py tests/law/test_steps.py",
        2,
    ),
    Fault(
        "the running variance is biased",
        "models/norm.py",
        "unbiased = found.variance_G * (found.count / (found.count - 1))",
        "unbiased = found.variance_G",
        "tests/law/test_steps.py",
        2,
    ),
    # Gradients and losses.
    Fault(
        "a tile's gradient is lost",
        "gradients.py",
        "        self._sums[parameter].add_(parameter.grad)\n",
        "        self._sums[parameter].copy_(parameter.grad)\n",
        "tests/test_gradients.py",
        2,
    ),
    Fault(
        "gradients are summed in float32",
        "gradients.py",
        "self._add_bucket(members, torch.float64 if wide else members[0].dtype)",
        "self._add_bucket(members, members[0].dtype)",
        "tests/test_gradients.py",
    ),
    Fault(
        "the gradient's length leaves a bucket out",
        "gradients.py",
        "        squares += flat.double().square().sum()\n",
        "        squares = flat.double().square().sum()\n",
        "tests/test_gradients.py",
    ),
    Fault(
        "frozen parameters of other stages are summed",
        "gradients.py",
        "self._parameters = [p for p in parameters if p.requires_grad]",
        "self._parameters = [p for p in parameters if p.requires_grad or True]",
        "tests/test_gradients.py tests/law/test_steps.py",
        2,
    ),
    Fault(
        "pixels to ignore count in the mean",
        "training/objective.py",
        "counts = target_BHW != self.ignore_index if weight_BHW is None else weight_BHW",
        "counts = target_BHW >= 0 if weight_BHW is None else weight_BHW",
        "tests/training/test_objective.py",
    ),
    Fault(
        "the focal loss forgets its power",
        "training/objective.py",
        "clamp_min(_TINY) ** self.gamma * entropies_P",
        "clamp_min(_TINY) * entropies_P",
        "tests/law/test_steps.py",
        2,
    ),
    Fault(
        "dropout depends on no step",
        "models/dropout.py",
        'words = f"{key.seed}/{key.step}/{key.image}/{name}".encode()',
        'words = f"{key.seed}/{key.image}/{name}".encode()',
        "tests/models",
    ),
    Fault(
        "dropout is not scaled",
        "models/dropout.py",
        "return x_BCHW * (kept_BC.to(x_BCHW.dtype) / (1 - self.probability))[:, :, None, None]",
        "return x_BCHW * kept_BC.to(x_BCHW.dtype)[:, :, None, None]",
        "tests/models",
    ),
    Fault(
        "the averaged weights stay in the network after a validation",
        "training/optimizer.py",
        "        try:\n            yield\n        finally:\n            self._swap()",
        "        yield",
        "tests/training/test_averaging.py",
    ),
    Fault(
        "the cosine ends at the wrong rate",
        "training/optimizer.py",
        "(1 + math.cos(math.pi * course.share(position, rate.warmup_steps))) / 2",
        "(1 + math.cos(math.pi * course.share(position, 0))) / 2",
        "tests/training/test_optimizer.py",
    ),
    # Sampling and statistics.
    Fault(
        "an epoch loses its last, smaller step",
        "raster/samples/sampling.py",
        "return math.ceil(self._tiles_per_epoch / self.tiles_per_step)",
        "return math.floor(self._tiles_per_epoch / self.tiles_per_step)",
        "tests/raster/test_sampling.py",
    ),
    Fault(
        "every epoch has the order of the first",
        "raster/samples/sampling.py",
        'drawn_number(f"tiledseg.sampling {self.seed}", str(epoch))',
        'drawn_number(f"tiledseg.sampling {self.seed}", "")',
        "tests/raster/test_sampling.py",
    ),
    Fault(
        "a resumed epoch begins one step late",
        "raster/samples/sampling.py",
        "if index >= first:",
        "if index > first:",
        "tests/raster/test_sampling.py tests/test_resume.py",
    ),
    Fault(
        "a rank's share of the pixels overlaps its neighbour's",
        "raster/statistics.py",
        "(rank + 1) * len(blocks) // size",
        "(rank + 1) * len(blocks) // size + 1",
        "tests/raster/test_statistics.py",
    ),
    Fault(
        "pixels without data enter the statistics",
        "raster/statistics.py",
        "values = (band_HW.ravel() if every else band_HW[valid_HW]).astype(np.float64)",
        "values = band_HW.ravel().astype(np.float64)",
        "tests/raster/test_statistics.py",
    ),
    # Checkpoints, resuming, outputs.
    Fault(
        "a damaged file of a checkpoint is read",
        "checkpoint/check.py",
        "elif sha256(path / name) != checksums.get(name):",
        "elif False:",
        "tests/checkpoint/test_checkpoint_damage.py",
    ),
    Fault(
        "a checkpoint gets its name before it is whole",
        "checkpoint/folder.py",
        "            _write(partial, step, contents, state)\n            _remove(final)",
        "            os.replace(partial, final)\n            partial = final\n"
        "            _write(partial, step, contents, state)\n            return final\n            _remove(final)",
        "tests/checkpoint/test_checkpoint_killed.py tests/checkpoint/test_checkpoint.py",
    ),
    Fault(
        "the best checkpoint is dropped with the old ones",
        "checkpoint/folder.py",
        "            if _step_of(old) != best:\n                _remove(old)",
        "            _remove(old)",
        "tests/training/test_best.py",
    ),
    Fault(
        "the optimizer's state is forgotten",
        "checkpoint/folder.py",
        '        for index, entries in whole["state"].items()\n',
        "        for index, entries in {}.items()\n",
        "tests/checkpoint/test_checkpoint.py tests/test_resume.py",
    ),
    Fault(
        "a run goes on with another number of classes",
        "training/resuming.py",
        "        if here[key] != value:\n            raise CheckpointError(",
        "        if False:\n            raise CheckpointError(",
        "tests/training/test_resume_rules.py tests/test_resume.py",
    ),
    Fault(
        "a map replaces its own image",
        "system/outputs.py",
        "sources = {identity: Path(source) for source in inputs for identity in _identities(source)}",
        "sources: dict[object, Path] = {}",
        "tests/test_outputs.py",
    ),
    Fault(
        "a file is written under its final name",
        "system/writing.py",
        "    part = temporary(path)\n    with writing(path):",
        "    part = Path(path)\n    with writing(path):",
        "tests/test_files.py",
    ),
    Fault(
        "a map's pixels without data get a class",
        "inference/mapping.py",
        "classes_HW[nothing_HW] = ignore_index",
        "pass",
        "tests/test_predict.py",
    ),
    Fault(
        "a map is shifted by a pixel at each tile",
        "geometry/tiling.py",
        "return self.core.relative_to(self.output)",
        "return self.core.relative_to(self.output).shift(1, 0)",
        "tests/law/test_outputs_and_gradients.py tests/geometry/test_tiling.py",
    ),
    # Communication and pipelines.
    Fault(
        "messages of two peers are swapped",
        "spatial/halo_exchange.py",
        "incoming = [message(*each) for each in zip(receives, strips_BHWC, strict=True)]",
        "incoming = [message(*each) for each in zip(reversed(list(receives)), strips_BHWC, strict=True)]",
        "tests/spatial/test_halo_exchange.py",
        4,
    ),
    Fault(
        "a signal in training is not acted on",
        "training/ending.py",
        "return is_met() or (",
        "return (",
        "tests/training/test_stop.py tests/test_signals.py",
    ),
    Fault(
        "bad input ends with exit code 1",
        "errors.py",
        "exit_code = 2",
        "exit_code = 1",
        "tests/test_command.py",
    ),
    *(Fault(*fault, "tests/pretend_gpu/test_runs.py") for fault in ON_A_GPU),
    *(Fault(*fault, "tests/pretend_gpu/test_laws.py") for fault in ON_TWO_GPUS),
)
