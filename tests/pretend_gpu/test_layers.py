"""Networks of every layer train on the pretend GPU with deterministic kernels, with the CPU's gradients."""

from __future__ import annotations

from tests.pretend_gpu.harness import PretendGpu


def test_every_layer_has_the_cpu_s_gradients(pretend_gpu: PretendGpu) -> None:
    ran = pretend_gpu.run(["-m", "tests.pretend_gpu.every_layer_job"]).sound()
    found = {line.rpartition(" | ")[2]: line for line in ran.output.splitlines() if " | " in line}
    assert {"EveryLayer True", "ForeignLayers True", "PaddingUNet"} <= set(found)
    failed = [line for line in found.values() if not line.startswith("same")]
    assert not failed, "\n".join(failed)
