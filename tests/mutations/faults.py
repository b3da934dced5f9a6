"""Faults to put into the library on purpose, and the tests that must catch each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Fault(NamedTuple):
    """A piece of a file of `tiledseg/`, its replacement, and the tests that fail with it on so many ranks."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    ranks: int


# Below each file with the tests of its faults, and their number of ranks if not 1: names of faults, each with its diff.
TEXT = r"""
== tracing/crops.py | law/test_crops.py
crops of a tile are added from the last to the first
-        crops = [*product(rows, cols)]
+        crops = [*product(rows, cols[::-1] if place.col.read.start else cols)]
a tile takes kept rows that lack its first ones
-rows_KHW.shape[1] + missing[each] >= 0
+rows_KHW.shape[1] > 0
a last batch of crops is smaller
-[group[-1]] * (size - len(group))
+[]
== geometry/layers/declared.py | law/test_crops.py
a blend is of a wrong width
-(side / 8)
+(side / 7)
a tile lacks a pixel of its crops
-more = self.grid.window - 1 if self.grid else 0
+more = self.grid.window - 2 if self.grid else 0
a crop that ends with the core is left out
-crop.used.start < core.stop
+crop.used.stop < core.stop
== models/layers/attention.py | spatial/test_attention.py
all ranks take the gradient of the first one's keys
-if source == own:
+if source == 0:
weights are merged without their maximum
-made[:, :, part] = made[:, :, part] * shrunk + weights @ values
+made[:, :, part] = made[:, :, part] + weights @ values
== tracing/functions/attention.py | tracing/test_refused.py
positions are added to attention unseen
-    refuse(isinstance(factor, Given), POSITIONS)
+    if isinstance(factor, Given):
+        return _paired(step, pairs)
== geometry/halo.py | geometry/test_halo.py
the halo is one alignment short
-width = round_up(max(before, after), alignment)
+width = round_up(max(before, after), alignment) - alignment
the exact halo forgets the pixels after a core
-max(need.stop - core.stop for core, need in needs)
+max(need.stop - core.stop for core, need in needs) - 1
the paper's formula loses its - 1
-(3 * 2.0 ** (levels - 2) - 1)
+(3 * 2.0 ** (levels - 2))
a halo that is too small is accepted
-if halo is not None and exact and halo < minimum:
+if halo is not None and exact and halo < minimum - 8:
== geometry/tiling.py | geometry/test_tiling.py
tile edges leave the pooling phase
-edges = [min(i * -(-last // unit) // parts * unit, last) for i in range(parts + 1)]
+edges = [i * last // parts for i in range(parts + 1)]
a context is not clipped at the raster's end
-clipped = context.clip(extended)
+clipped = context
== geometry/layers/layer.py | geometry/test_receptive_field.py geometry/test_halo.py
a convolution reads one pixel less
-return Interval(start, start + (out.size - 1) * stride + reach + 1)
+return Interval(start, start + (out.size - 1) * stride + reach)
== geometry/layers/convolutions.py | geometry/test_receptive_field.py geometry/test_halo.py
a dilated kernel counts as a dense one
-return LayerWindow(self.stride, self.padding, self.dilation * (self.kernel - 1), self.extra)
+return LayerWindow(self.stride, self.padding, self.kernel - 1, self.extra)
== geometry/sharing/decomposition.py | spatial/test_halo_exchange.py
a rank is sent the wrong part of a window
-parts = ((peer, own.clip(wanted)) for
+parts = ((peer, own.clip(windows[peer - 1])) for
== geometry/sharing/decomposition.py | geometry/test_decomposition.py
blocks of ranks are cut beside the tiles' edges
-return range(block * tiles // parts, (block + 1) * tiles // parts)
+return range(-(-block * tiles // parts), -(-(block + 1) * tiles // parts))
== spatial/halo_exchange.py | spatial/test_halo_exchange.py | 2 ranks
halo gradients replace their owner's in place of being added
-part(self.made_BCHW, patch).add_(strip_BCHW)
+part(self.made_BCHW, patch).copy_(strip_BCHW)
a gradient of what others read is lost
-for patch, strip_BCHW in self.arriving:
-            part(self.made_BCHW, patch).add_(strip_BCHW)
+for patch, strip_BCHW in self.arriving[1:]:
+            part(self.made_BCHW, patch).add_(strip_BCHW)
== spatial/twins.py | spatial/test_layers.py
max pooling is padded with zeros at the image's end
-fill = float("-inf")
+fill = 0.0
average pooling counts padding that the layer does not
-divisor = 1 if inside_only else m.divisor_override
+divisor = None if inside_only else m.divisor_override
== geometry/layers/declared.py | tracing/test_windows.py
a shifted window has another place
-return Interval(first * self.size + self.shift, stop * self.size + self.shift)
+return Interval(first * self.size, stop * self.size)
results of shifted windows are not given back
-return edge - self.moved
+return edge
== models/layers/pixelwise.py | tracing/test_windows.py
zeros before a rank's windows are left out
-before, after = place.read.start % layer.size,
+before, after = 0,
zeros stand where the image ends
-return (before + more, after) if place.read.start else (before, after + more)
+return before + more, after
== models/normalise.py | spatial/test_layers.py
moments of ranks are merged without their counts
-return Statistics(*merge(counts, means, variances), counts.sum(0))
+return Statistics(*merge(torch.ones_like(counts), means, variances), counts.sum(0))
== models/normalise.py | law/test_steps.py | 2 ranks
the running variance is biased
-unbiased = found.variance_G * (found.count / (found.count - 1))
+unbiased = found.variance_G
== gradients.py | test_gradients.py | 2 ranks
a tile's gradient is lost
-        self._sums[parameter].add_(parameter.grad)
+        self._sums[parameter].copy_(parameter.grad)
== gradients.py | test_gradients.py
gradients are summed in float32
-self._add_bucket(members, torch.float64 if wide else members[0].dtype)
+self._add_bucket(members, members[0].dtype)
the gradient's length leaves a bucket out
-        squares += flat.double().square().sum()
+        squares = flat.double().square().sum()
== gradients.py | test_gradients.py law/test_steps.py | 2 ranks
frozen parameters of other stages are summed
-self._parameters = [p for p in parameters if p.requires_grad]
+self._parameters = [p for p in parameters if p.requires_grad or True]
== training/objective.py | training/test_objective.py
pixels to ignore count in the mean
-counts = target_BHW != self.ignore_index if weight_BHW is None else weight_BHW
+counts = target_BHW >= 0 if weight_BHW is None else weight_BHW
== training/objective.py | law/test_steps.py | 2 ranks
the focal loss forgets its power
-clamp_min(_TINY) ** self.gamma * entropies_P
+clamp_min(_TINY) * entropies_P
== models/dropout.py | models
dropout depends on no step
-words = f"{key.seed}/{key.step}/{key.image}/{name}".encode()
+words = f"{key.seed}/{key.image}/{name}".encode()
dropout is not scaled
-return x_BCHW * (kept_BC.to(x_BCHW.dtype) / (1 - self.probability or 1.0))[:, :, None, None]
+return x_BCHW * kept_BC.to(x_BCHW.dtype)[:, :, None, None]
== training/optimizer.py | training/test_optimizer.py
the averaged weights stay in the network after a validation
-        try:
-            yield
-        finally:
-            self._swap()
+        yield
the cosine ends at the wrong rate
-(1 + math.cos(math.pi * course.share(position, rate.warmup_steps))) / 2
+(1 + math.cos(math.pi * course.share(position, 0))) / 2
== raster/samples/sampling.py | raster/test_sampling.py
an epoch loses its last, smaller step
-return math.ceil(self._tiles_per_epoch / self.tiles_per_step)
+return math.floor(self._tiles_per_epoch / self.tiles_per_step)
every epoch has the order of the first
-drawn_number(f"tiledseg.sampling {self.seed}", str(epoch))
+drawn_number(f"tiledseg.sampling {self.seed}", "")
== raster/samples/sampling.py | raster/test_sampling.py test_train.py
a resumed epoch begins one step late
-if index >= first:
+if index > first:
== raster/statistics.py | raster/test_dataset.py
a rank's share of the pixels overlaps its neighbour's
-(rank + 1) * len(blocks) // size
+(rank + 1) * len(blocks) // size + 1
pixels without data enter the statistics
-values = (band_HW.ravel() if every else band_HW[valid_HW]).astype(np.float64)
+values = band_HW.ravel().astype(np.float64)
== checkpoint/folder.py | checkpoint/test_checkpoint.py
a damaged file of a checkpoint is read
-elif sha256(path / file) != checksums.get(file):
+elif False:
== checkpoint/folder.py | checkpoint/test_checkpoint_killed.py checkpoint/test_checkpoint.py
a checkpoint gets its name before it is whole
-            _write(partial, contents, state)
-            _remove(final)
+            os.replace(partial, final)
+            partial = final
+            _write(partial, contents, state)
+            return final
+            _remove(final)
== checkpoint/folder.py | training/test_best.py
the best checkpoint is dropped with the old ones
-            if step != best:
-                _remove(old)
+            _remove(old)
== checkpoint/folder.py | checkpoint/test_checkpoint.py test_train.py
the optimizer's state is forgotten
-            for index, entries in state.items()
+            for index, entries in {}.items()
== training/resuming.py | training/test_resuming.py test_train.py
a run goes on with another number of classes
-        if here[key] != value:
-            raise CheckpointError(
+        if False:
+            raise CheckpointError(
== system/outputs.py | test_outputs.py
a map replaces its own image
-sources = {identity: Path(source) for source in inputs for identity in _identities(source)}
+sources: dict[object, Path] = {}
== system/files.py | test_files.py
a file is written under its final name
-    part = temporary(path)
-    with writing(path):
+    part = Path(path)
+    with writing(path):
== inference/mapping.py | test_predict.py
a map's pixels without data get a class
-classes_HW[nothing_HW] = ignore_index
+pass
== geometry/tiling.py | law/test_outputs_and_gradients.py geometry/test_tiling.py
a map is shifted by a pixel at each tile
-return self.core.relative_to(self.output)
+return self.core.relative_to(self.output).shift(1, 0)
== spatial/halo_exchange.py | spatial/test_halo_exchange.py | 4 ranks
messages of two peers are swapped
-incoming = [message(*each) for each in zip(receives, strips_BHWC, strict=True)]
+incoming = [message(*each) for each in zip(reversed(list(receives)), strips_BHWC, strict=True)]
== training/trainer.py | training/test_start.py test_signals.py
a signal in training is not acted on
-return is_met() or (
+return (
== errors.py | test_command.py
bad input ends with exit code 1
-exit_code = 2
+exit_code = 1
== memory/host.py | pretend_gpu/test_runs.py
a lane does not wait for computing
-lane.wait_stream(stream)
+pass
computing does not wait for a copy in
-stream.wait_event(self.event)
+pass
== execution/carrying.py | pretend_gpu/test_runs.py
a step does not wait for its input
-stream.wait_event(self.event)
+pass
an input's memory is given out early
-tensor.record_stream(stream)
+pass
== memory/device.py | pretend_gpu/test_runs.py
a map, a checkpoint, or sums of a validation are taken before they are there
-event.synchronize() or copies
+copies
== checkpoint/folder.py | pretend_gpu/test_runs.py::test_losses_and_checkpoints_are_the_cpu_s
a checkpoint is written before it is there
-asked_back(*(tensor.detach() for own in files.values() for tensor in own.values()))()
+tensor.detach().to("cpu", non_blocking=True) for own in files.values() for tensor in own.values()
== memory/device.py | pretend_gpu/test_runs.py
a table stays on the host
-    if not is_gpu(device):
-        return tensor.to(device)
+    return tensor
a tensor is pinned and not whole
-return pinned.copy_(tensor).to(
+return pinned.to(
== execution/carrying.py | pretend_gpu/test_laws.py
a reader takes the first GPU
-with gpu.device(stream.device), gpu
+with gpu
== comm/point_to_point.py | pretend_gpu/test_laws.py
a message is staged asynchronously
-buffer.copy_(as_bytes(tensor))
+buffer.copy_(as_bytes(tensor), non_blocking=True)
== comm/transport_torch.py | pretend_gpu/test_laws.py
nobody waits for NCCL
-            work.wait()
+            pass
== models/layers/resampling.py | pretend_gpu/test_gpu_path.py
bicubic upsampling has torch's gradient
-return mode in KERNELS and device != "cpu" and deterministic
+return False
a border's reflection has torch's gradient
-return Reflected.apply(x_BCHW, pads)
+return functional.pad(x_BCHW, pads, mode="reflect")
== models/layers/pooling.py | pretend_gpu/test_gpu_path.py
average pooling on a GPU counts padding
-if count_include_pad or divisor_override is not None:
+if True:
== execution/carrying.py | pretend_gpu/test_gpu_path.py
kernels without an order are taken
-"error" if on else "default"
+"default"
== execution/carrying.py | pretend_gpu/test_gpu_path.py::test_a_network_without_an_order_is_refused_in_a_line
a kernel without an order ends in a traceback
-if "does not have a deterministic implementation" not in str(error):
+if error:
== execution/memory.py | pretend_gpu/test_gpu_path.py::test_the_peak_is_that_of_the_run
a peak is that of the process
-api(device).reset_peak_memory_stats(device)
+pass
== memory/allocations.py | pretend_gpu/test_gpu_path.py::test_memory_that_a_library_lacks_is_a_line_with_what_would_fit
memory that CUDA lacks is an unforeseen error
-("out of memory", "_ALLOC_FAILED"
+("_ALLOC_FAILED"
memory that cuDNN lacks is an unforeseen error
-, "_ALLOC_FAILED"
+
== memory/host.py | pretend_gpu/test_laws.py::test_tests_of_a_gpu[test_host_on_gpu]
a copy in does not wait for the copy out
-lane.wait_event(sent.event)
+pass
what comes back is given out early
-self._brought_P.record_stream(here)
+pass
a stream that computes is not noted
-        self.look()
-        return True
+        return True
one stream of several comes after a copy
-        for stream in self._mover.computing:
-            stream.wait_event(self.event)
+        here.wait_event(self.event)
== memory/ledger.py | pretend_gpu/test_runs.py
memory is given out before its copy is out
-        entry.sent.wait()
+        pass
== memory/mover.py | pretend_gpu/test_laws.py::test_tests_of_a_gpu[test_host_on_gpu]
memory is kept whose copy out still reads it
-sent.stop()
+pass
== execution/carrying.py | pretend_gpu/test_runs.py
classes' memory is given out early
-for tensor in (self.x_CHW, self.labels_HW):
+for tensor in (self.x_CHW,):
== execution/carrying.py | pretend_gpu/test_gpu_path.py::test_the_host_waits_once_a_step_and_a_checkpoint
an input's event is another stream's
-labels_HW, stream.record_event()
+labels_HW, gpu.current_stream(device).record_event()
== memory/device.py | pretend_gpu/test_gpu_path.py::test_the_host_waits_once_a_step_and_a_checkpoint
numbers of a loss stay on the host
-return torch.tensor(values, dtype=dtype).to(device)
+return torch.tensor(values, dtype=dtype)
== gradients.py | pretend_gpu/test_gpu_path.py::test_the_host_waits_once_a_step_and_a_checkpoint
clipping asks the GPU
-torch.where(norm > largest_norm, largest_norm / norm, 1.0)
+largest_norm / norm if norm > largest_norm else 1.0
== memory/device.py | pretend_gpu/test_laws.py::test_laws_hold_without_races[2-mpi]
all ranks of a node take its first GPU
-local_rank % api(kind).device_count()
+0
== memory/device.py | comm/test_mesh.py
a rank that sees one GPU takes another one
-local_rank % api(kind).device_count()
+local_rank
== memory/device.py | pretend_gpu/test_laws.py::test_laws_hold_without_races[2-nccl-one-visible]
GPUs are told apart by their numbers
-str(getattr(api(device).get_device_properties(device), "uuid", device))
+str(device)
== comm/session.py | pretend_gpu/test_laws.py::test_laws_hold_without_races[2-mpi]
a rank's libraries take the first GPU
-api(device).set_device(device)
+pass
== comm/point_to_point.py | pretend_gpu/test_laws.py::test_laws_hold_without_races[2-mpi]
a message is taken before it is there
-                    finish()
-                for tensor, buffer in staged:
-                    as_bytes(tensor).copy_(buffer)  # not asynchronous: torch hands the buffer out again
+                    for tensor, buffer in staged:
+                        as_bytes(tensor).copy_(buffer)
+                    finish()
"""


def _faults() -> Iterator[Fault]:
    for head, *lines in (block.splitlines() for block in TEXT.split("\n== ")[1:]):
        file, tests, *ranks = head.split(" | ")
        paths = " ".join(f"tests/{test}" for test in tests.split())
        for name, diff in re.findall(r"^([^-+].*)\n((?:[-+].*\n)+)", "\n".join([*lines, ""]), re.MULTILINE):
            old, new = ("\n".join(line[1:] for line in diff.splitlines() if line[0] == sign) for sign in "-+")
            yield Fault(name, file, old, new, paths, int(ranks[0].split()[0]) if ranks else 1)


FAULTS = tuple(_faults())
