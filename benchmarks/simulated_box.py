"""A profile of the simulated engine, served over HTTP, beside the step model that drives it.

    python benchmarks/simulated_box.py [PROFILE] [--concurrency 1,8,32,64]

Starts the service, sweeps it with `glm5 load` (an instrument that knows nothing of the model), and prints tok/s
measured and expected. C users in a closed loop, each with a prompt of P tokens and N tokens of answer, whose prompts
stop everybody while they are read, make

    C * N / (sum over the N steps of step(C, context) + C * prefill(P))    tokens a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from service.config import load  # noqa: E402
from service.engines.options import SimulatedOptions  # noqa: E402
from service.engines.simulated import StepClock, make_clock  # noqa: E402
from tests.service import GLM5, running  # noqa: E402

PROMPT, OUTPUT = 128, 256


def expected(clock: StepClock, users: int, prompt: float, output: int) -> float:
    steps = sum(clock.decode_step_s(users, int(users * (prompt + i))) for i in range(output))
    return users * output / (steps + users * clock.prefill_s(round(prompt)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", nargs="?", default="deployments/profiles/sim-8x-rtx-pro-6000.yaml")
    parser.add_argument("--concurrency", default="1,8,32,64")
    given = parser.parse_args()
    options = next(iter(load(ROOT / given.profile).pools.values())).engine
    assert isinstance(options, SimulatedOptions), "the profile's engine is not simulated"
    clock = make_clock(options)
    print(f"{given.profile}, {time.strftime('%Y-%m-%d')}; {PROMPT} tokens in, {OUTPUT} out\n")
    print("| users | measured tok/s | the model's | difference | ITL p50 ms | step ms | failed |")
    print("|---|---|---|---|---|---|---|")
    with running(given.profile) as service, tempfile.TemporaryDirectory() as folder:
        sweep = [GLM5, "load", "sweep", service.url, "--concurrency", given.concurrency, "--out", f"{folder}/run"]
        subprocess.run(
            [*sweep, "--input-tokens", str(PROMPT), "--output-tokens", str(OUTPUT)], check=True, stdout=sys.stderr
        )
        levels = json.loads(Path(folder, "run/summary.json").read_text())["levels"]
    for level in levels:
        users, measured = level["concurrency"], level["measured"]
        want = expected(clock, users, measured["input_tokens"], OUTPUT)
        got = measured["output_tok_s"]
        step = clock.decode_step_s(users, int(users * (PROMPT + OUTPUT / 2)))
        print(
            f"| {users} | {got:.1f} | {want:.1f} | {got / want - 1:+.1%} | {1e3 * measured['itl']['p50']:.1f} "
            f"| {1e3 * step:.1f} | {measured['failed']} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
