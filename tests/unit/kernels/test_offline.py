"""The kernels compile for GPUs that are not here, with the tensor cores and within what a block may use there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from service.engines.vllm.kernels import offline
from service.engines.vllm.kernels.choose import LinearTile, MoeTile
small = LinearTile(64, 8, 2, 2, 3)
pair = MoeTile(False, small, LinearTile(32, 8, 1, 2, 2), 1, {1})
found = offline.moe_resources((4, 6), 256, 256, 6144, 1, 8, pair, {0})
found += offline.linear_resources(14, 512, 512, 1, small, {0})
for r in found:
    print(r.kernel, r.fits, r.spill_bytes, r.tensor_core)
"""


@pytest.mark.parametrize(("capability", "early"), [(120, True), (90, False)])
def test_compiles_and_fits(capability: int, early: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(capability, early)], env=environment, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["w13_pair_kernel", "w2_pair_kernel", "linear_kernel"]
    for name, fits, spilled, core in lines:
        assert fits == "True" and int(spilled) <= 64 and core == "mma.sync", name
