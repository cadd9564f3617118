"""How long a start takes on a GPU: the first on an empty cache, and the second; and what is compiled after ready.

    python benchmarks/start_gpu.py FILE [--set 'mode="interactivity"'] [--starts 2] [--cache FOLDER]

Each start is VllmEngine in a process of its own, as a replica has it, without Ray and HTTP (those add some 15 s). All
caches (vLLM's, Triton's, inductor's, config and tokenizer) lie in one folder, fresh unless --cache names one. After
ready a sweep of 1, 64, 256 and 1024 users and prompts of 1 to the context runs; kernels that Triton compiles then are
counted by their files (the goal is 0), and the first burst's time to first token stands beside the later ones'.
Prints one table a start: phase and seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels_in_engine import paths
from tests.gpu.validate_vllm import orjson_or_json
from tests.vllm.faults import plugin_path

USERS = (1, 64, 256, 1024)


def compiled(cache: Path) -> int:
    """Kernels in Triton's cache."""
    return sum(1 for _ in (cache / "triton").rglob("*.cubin"))


async def one_start(given: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Load, sweep, close, in this process."""
    began = time.perf_counter()
    from service.engines.phases import Phases
    from service.engines.vllm.engine import VllmEngine
    from service.engines.vllm.options import VllmOptions
    from service.types import LoadProgress

    options = VllmOptions(
        cache_dir=str(cache / "glm5"), load_timeout_s=560, allow_other_versions=True, prefix_cache=False,
        **{key: json.loads(value) for key, value in (pair.split("=", 1) for pair in given.set)},
    )  # fmt: skip
    engine = VllmEngine(
        model=str(given.file), served_name="m", slots=given.slots, context_tokens=given.context, options=options
    )
    phases = Phases()

    def report(progress: LoadProgress) -> None:
        if progress.phase != phases.current:
            print(f"  {time.perf_counter() - began:6.1f} s {progress.phase} {progress.detail}", file=sys.stderr)
        phases.say(progress)

    await engine.load(report)
    phases.say(LoadProgress("done"))
    found: dict[str, Any] = {"phases": phases.past, "ready_s": time.perf_counter() - began}
    before = compiled(cache)
    bursts = {}
    for users in (u for u in USERS if u <= given.slots):
        bursts[users] = [await burst(engine, users, 64, serial) for serial in range(3)]
    found["ttft_p95_s"] = bursts
    for length in (1, 2, 3, 7, 17, 63, 100, 255, 300, 511, 700, 1023, 1500, given.context - 2):
        if length < given.context:
            await burst(engine, 1, length, 100 + length)
    found["compiled_after_ready"] = compiled(cache) - before
    await engine.close()
    return found


async def burst(engine: Any, users: int, prompt: int, serial: int) -> float:
    """p95 over `users` at once of the time to the first token."""
    asked = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    began, first = time.perf_counter(), []

    async def one(index: int) -> None:
        tokens = [10 + (7 * serial + 31 * index + 17 * j) % 20000 for j in range(prompt)]
        await engine.layer.generate(tokens, asked, f"{serial}-{users}-{prompt}-{index}")
        first.append(time.perf_counter() - began)

    await asyncio.gather(*(one(index) for index in range(users)))
    return statistics.quantiles(first, n=20)[-1] if users > 1 else first[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="a setting of the engine")
    parser.add_argument("--slots", type=int, default=1024)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--cache", type=Path, help="keep the caches here, and use what is there")
    parser.add_argument("--one", action="store_true", help="one start, in this process")
    given = parser.parse_args()
    orjson_or_json()
    import torch

    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    if given.one:
        print("RESULT " + json.dumps(asyncio.run(one_start(given, given.cache))), flush=True)
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.file.name}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory() as place:
        cache = (given.cache or Path(place) / "cache").resolve()
        env = os.environ | paths() | {
            "VLLM_CACHE_ROOT": str(cache / "vllm"), "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }  # fmt: skip
        env["PYTHONPATH"] += os.pathsep + plugin_path(Path(place) / "plugin", faults=False)
        command = [sys.executable, __file__, str(given.file), "--one", "--cache", str(cache)]
        command += ["--slots", str(given.slots), "--context", str(given.context), *(f"--set={s}" for s in given.set)]
        right = True
        for number in range(1, given.starts + 1):
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=590, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            right &= bool(lines)
            if not lines:
                print(f"start {number}: no result")
                continue
            found = json.loads(lines[-1][7:])
            print(f"start {number}: ready after {found['ready_s']:.1f} s (imports of Python included)")
            for phase, seconds in found["phases"]:
                print(f"| {phase} | {seconds:.1f} s |")
            for users, times in found["ttft_p95_s"].items():
                print(f"| {users} users, TTFT p95 of three bursts | {', '.join(f'{t:.3f}' for t in times)} s |")
            print(f"| kernels compiled after ready | {found['compiled_after_ready']} |", flush=True)
        return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
