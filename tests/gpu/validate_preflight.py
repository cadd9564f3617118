"""Preflight on real GPUs, under two minutes on two of them: python3 tests/gpu/validate_preflight.py [--json FILE]

Runs the product's own probe and report, then two sabotages that must be caught on real hardware: a collective in which
one rank never arrives (it must be killed at its deadline and named a hang), and a copy whose target is spoilt after it
(the comparison must count every spoilt byte). Needs torch with CUDA; neither vLLM nor this package installed. NVLink
multicast stays as the environment has it (off by default).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from service.planning import hardware
from service.planning.step_model import step_model
from service.preflight import jobs
from service.preflight.probe import ProbeFailed
from service.preflight.real import RealProbe
from service.preflight.report import run

SIZES = (4096, 12288, 49152, 98304, 196608, 786432, 3145728)


class OneRankMissing(RealProbe):
    """Rank 0 does not come to the collective: it waits for ever at the meeting file of another."""

    def hang(self, timeout_s: float) -> ProbeFailed | None:
        jobs_ = [{"world": self._count, "rank": 1, "store": f"/tmp/glm5-nobody-{os.getpid()}"}]
        _, fault = self._run("first_collective", jobs_, timeout_s)
        return fault


def spoilt_copy_is_counted() -> bool:
    import torch

    sent = jobs._pattern(1 << 20, 3, "cuda:0")
    got = torch.zeros_like(sent, device="cuda:1")
    got.copy_(sent)
    torch.cuda.synchronize()
    got[1000:1100] ^= 1  # a hundred words lost on the way
    return int((got != jobs._pattern(1 << 20, 3, "cuda:1")).sum().item()) == 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("/tmp/preflight.json"))
    options = parser.parse_args()
    began = time.monotonic()
    # before what is there already, such as a vLLM that is not installed
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = dict(os.environ) | {"PYTHONPATH": path}
    probe = OneRankMissing(environment, timeout_s=60.0, collective_timeout_s=60.0, sizes=SIZES)
    report = run(probe, lambda what: print(f"[{time.monotonic() - began:5.1f} s] {what}", flush=True))
    tree = report.to_json("validation")
    options.json.write_text(json.dumps(tree, indent=1))
    for f in report.findings:
        print(f"{f.status:4} {f.name}: {f.found[:150]}")
    tables = {name: dict(t.table) for name, t in report.tables.items() if t.table}
    if tables:
        print("all-reduce us  " + "".join(f"{name:>15}" for name in tables))
        for size in SIZES:
            print(
                f"{size / 1024:10g} KiB " + "".join(f"{rows.get(size, float('nan')):15.1f}" for rows in tables.values())
            )
    wrong = 0
    if len(report.devices) > 1:
        fault = probe.hang(20.0)
        caught = fault is not None and fault.hung
        print(f"sabotage, a rank that never comes: {'caught' if caught else 'NOT CAUGHT'} ({fault})")
        spoilt = spoilt_copy_is_counted()
        print(f"sabotage, a spoilt copy: {'counted' if spoilt else 'NOT COUNTED'}")
        wrong += (not caught) + (not spoilt)
    box = hardware.box(str(options.json))
    print(f"planning reads it: {box.gpus} x {box.gpu.title}, {box.gpu.readable / 1e12:.2f} TB/s, trust {box.trust}")
    model = step_model("glm-5", str(options.json), tp=box.gpus)
    print(f"157 all-reduces of a GLM-5 step at TP={box.gpus}: {model.split(1).allreduce * 1e3:.2f} ms untuned")
    needed = ["GPUs", "memory bandwidth"] + (["integrity of peer copies", "first collective"] if box.gpus > 1 else [])
    status = {f.name: f.status for f in report.findings}
    wrong += sum(status.get(name) != "ok" for name in needed)
    print(f"{time.monotonic() - began:.0f} s; {'all right' if not wrong else f'{wrong} wrong'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
