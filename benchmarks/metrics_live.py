"""Tok/s by concurrency and latencies as /metrics tells them, beside what a client of the same streams measures.

    python benchmarks/metrics_live.py [--repeats 3]

`glm5 serve` with the demo model at 1, 2, 4 and 8 streams. A stream is busy at the replica a little before its client
sees its first token and after its last, so a single short stream differs most. Medians of the repeats; goal 5 %, 8 % at
one stream, on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from service.metrics.labels import CONCURRENCY, concurrency_index
from tests.e2e.traffic import run_level
from tests.service import Service, running
from tests.unit.metrics.read import Samples, samples, total

LEVELS = ((1, 240), (2, 150), (4, 100), (8, 64))
"""(streams at once, tokens each)."""


def scrape(service: Service) -> Samples:
    return samples(httpx.get(f"{service.url}/metrics", timeout=20.0).text)


def rates(service: Service, at_once: int, tokens: int) -> tuple[float, float, float, float]:
    """(client's tok/s at this concurrency, /metrics', client's mean TTFT in s, /metrics')."""
    bucket = CONCURRENCY[concurrency_index(at_once)]
    least, _, most = bucket.partition("-")
    before = scrape(service)
    level = run_level(service.url, service.model, at_once, tokens)
    time.sleep(1.0)
    after = scrape(service)

    def grown(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    made = grown("glm_output_tokens_by_concurrency_total", concurrency=bucket)
    told = made / grown("glm_busy_seconds_by_concurrency_total", concurrency=bucket)
    firsts = [stream.first - stream.sent for stream in level.streams]
    ttft = grown("glm_ttft_seconds_sum") / grown("glm_ttft_seconds_count")
    return level.tokens_per_s(int(least), float(most or least)), told, statistics.mean(firsts), ttft


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, median of {given.repeats}\n")
    print("| streams | client tok/s | /metrics | off | client TTFT ms | /metrics |\n|---|---|---|---|---|---|")
    right = True
    with running() as service:
        run_level(service.url, service.model, 8, 8)
        for at_once, tokens in LEVELS:
            found = [rates(service, at_once, tokens) for _ in range(given.repeats)]
            client, told, seen, ttft = (statistics.median(column) for column in zip(*found, strict=True))
            off = statistics.median(one[1] / one[0] - 1 for one in found)
            right &= abs(off) <= (0.05 if at_once > 1 else 0.08)
            print(
                f"| {at_once} | {client:.1f} | {told:.1f} | {off:+.1%} | {1e3 * seen:.1f} | {1e3 * ttft:.1f} |",
                flush=True,
            )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
