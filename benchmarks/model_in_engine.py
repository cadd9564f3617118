"""A real GGUF model in vLLM, the plugin's kernels against the packed ones: tokens a second by concurrency, and prefill.

    python benchmarks/model_in_engine.py FILE [--users 1,8,64,256]   # each variant on a GPU of its own if there are two

Decoding: C answers of 128 tokens to prompts of 16, started together; all tokens over the time from first to last.
Prefill: 8 prompts of 1000 tokens for one token each; prompt tokens over the time. Medians of three; CUDA graphs and
torch.compile as `glm5 serve` has them. The model is small: what is compared is whole steps, host included.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.kernels_in_engine import paths
from tests.gpu.validate_vllm import orjson_or_json
from tests.vllm.faults import plugin_path

REPEATS, ANSWER, PROMPT = 3, 128, 1000
VARIANTS = ("plugin", "packed")


async def measure(path: Path, kernels: str, users: list[int]) -> dict[str, float]:
    """{"prefill" or concurrency: tokens a second}."""
    from service.engines.vllm.engine import VllmEngine
    from service.engines.vllm.options import VllmOptions
    from service.types import LoadProgress

    engine = VllmEngine(
        model=str(path), served_name="m", slots=max(users), context_tokens=2048,
        options=VllmOptions(
            cache_dir=tempfile.mkdtemp(), load_timeout_s=500, prefix_cache=False, allow_other_versions=True,
            kernels=kernels, gpu_memory_fraction=0.5,
        ),
    )  # fmt: skip
    began = time.perf_counter()

    def report(progress: LoadProgress) -> None:
        print(f"{kernels} {time.perf_counter() - began:6.1f} s {progress.phase}: {progress.detail}", file=sys.stderr)

    await engine.load(report)
    serial = 0

    async def together(count: int, prompt: int, answer: int) -> float:
        nonlocal serial
        serial += 1
        asked = {"temperature": 0.0, "max_tokens": answer, "ignore_eos": True}
        prompts = [[10 + (7 * serial + 31 * i + 17 * j) % 20000 for j in range(prompt)] for i in range(count)]
        began = time.perf_counter()
        await asyncio.gather(*(engine.layer.generate(p, asked, f"{serial}-{i}") for i, p in enumerate(prompts)))
        return time.perf_counter() - began

    try:
        found = {}
        await together(8, PROMPT, 1)
        found["prefill"] = 8 * PROMPT / statistics.median([await together(8, PROMPT, 1) for _ in range(REPEATS)])
        for c in users:
            await together(c, 16, 8)
            found[str(c)] = c * ANSWER / statistics.median([await together(c, 16, ANSWER) for _ in range(REPEATS)])
        return found
    finally:
        await engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--users", default="1,8,64,256")
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process")
    given = parser.parse_args()
    orjson_or_json()
    if given.variant:
        users = [int(c) for c in given.users.split(",")]
        print("RESULT " + json.dumps(asyncio.run(measure(given.file, given.variant, users))), flush=True)
        return 0
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {given.file.name}, {time.strftime('%Y-%m-%d')}")

    def alone(number: int) -> dict[str, float]:
        """One variant in a process of its own; empty if it did not end well."""
        command = [sys.executable, __file__, str(given.file), "--users", given.users, "--variant", VARIANTS[number]]
        env = os.environ | paths() | {"CUDA_VISIBLE_DEVICES": str(number % gpus)}
        with tempfile.TemporaryDirectory() as place:
            # the package's entry point, which vLLM finds our weights adapter by, also where it is not installed
            env["PYTHONPATH"] += os.pathsep + plugin_path(Path(place), faults=False)
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=580, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found = dict(json.loads(lines[-1][7:])) if lines else {}
        print(f"{VARIANTS[number]}: {found or 'no result'}", flush=True)  # a run that is cut off has said what it knew
        return found

    with ThreadPoolExecutor(gpus) as pool:
        results = list(pool.map(alone, range(len(VARIANTS))))
    print("| tok/s | plugin | packed | packed / plugin |\n|---|---|---|---|")
    for key in ("prefill", *given.users.split(",")):
        a, b = (result.get(key, float("nan")) for result in results)
        print(f"| {key} | {a:.0f} | {b:.0f} | {b / a:.2f} |")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
