"""How near `glm5 load` is to the truth, and how much it can take: `python -m benchmarks.load_truth [--repeats 3]`.

The server (tests/fake_openai) keeps a script and logs the clock at each write. For C = 1, 10, 64 and 256: each metric's
deviation from that log and from the script, the median of the repeats. Then 256 streams at 8 ms a token, one write a
token, with server and client on the same cores. These depend on the machine, so they are figures and not tests: what a
figure must be whatever the machine is in tests/unit/loadtest/test_truth.py.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np

from loadtest.plan import Level
from tests.fake_openai import FakeServer, Script
from tests.unit.loadtest.rig import Ran, run

TTFT, STEP, ITL, OUT = 0.20, 0.02, 0.02, 16
CYCLE = TTFT + 4.5 * STEP + (OUT - 1) * ITL


def deviations(ran: Ran, concurrency: int) -> dict[str, float]:
    """Metric -> its share of deviation from the truth."""
    m = ran.measured
    records = sorted(ran.outcome.records, key=lambda r: r.sent)
    entries = sorted(ran.log, key=lambda e: e["arrived"])
    kept = [entry for record, entry in zip(records, entries, strict=True) if not record.warmup]
    writes = [np.array([t for t, _ in entry["writes"]]) for entry in kept]
    arrived = np.array([entry["arrived"] for entry in kept])
    first, last = np.array([w[0] for w in writes]), np.array([w[-1] for w in writes])
    assert m.ttft and m.e2el and m.tpot and m.itl and m.output_tok_s
    pairs = {
        "ttft, log": (m.ttft.mean, float((first - arrived).mean())),
        "ttft p95, log": (m.ttft.p95, float(np.percentile(first - arrived, 95))),
        "e2el, log": (m.e2el.mean, float((last - arrived).mean())),
        "tpot, log": (m.tpot.mean, float(((last - first) / (OUT - 1)).mean())),
        "ttft, script": (m.ttft.mean, TTFT + 4.5 * STEP),
        "itl, script": (m.itl.mean, ITL),
        "e2el, script": (m.e2el.mean, CYCLE),
        "tok/s, script": (m.output_tok_s, concurrency * OUT / CYCLE),
    }
    return {name: got / truth - 1 for name, (got, truth) in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="odd, so that the median is a run")
    repeats = parser.parse_args().repeats
    if repeats < 1 or repeats % 2 == 0:
        parser.error(f"--repeats {repeats}: an odd number from 1 on")
    with FakeServer(Script()) as server:
        for concurrency in (1, 10, 64, 256):
            rounds = {1: 10, 10: 8}.get(concurrency, 4)  # few streams need more rounds for the edges not to count
            level = Level(0, concurrency, requests=rounds * concurrency, ramp_s=CYCLE, timeout_s=60)
            script = Script(ttft_s=TTFT, ttft_step_s=STEP, itl_s=ITL)
            found = [deviations(run(server, script, level, output_tokens=OUT), concurrency) for _ in range(repeats)]
            for name in found[0]:
                values = [one[name] for one in found]
                spread = f"{min(values):+.2%} to {max(values):+.2%}"
                print(f"C = {concurrency:3}  {name:14} {statistics.median(values):+.2%}  ({spread}, {repeats} runs)")
        script = Script(itl_s=0.008, log_writes=False)
        level = Level(0, 256, requests=768, ramp_s=1.0, timeout_s=60)
        for _ in range(repeats):
            ran = run(server, script, level, output_tokens=128)
            client = ran.summary.client
            busy = f"{client.busy:.0%}" if client else "?"
            valid = "valid" if ran.summary.valid else f"invalid: {ran.summary.reasons}"
            print(f"C = 256, 8 ms: {ran.measured.output_tok_s or 0:.0f} tok/s, client busy {busy}, {valid}")


if __name__ == "__main__":
    main()
