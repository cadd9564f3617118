"""Our HTTP path beside its peers, in one run: raw llama.cpp in process, llama.cpp's own HTTP server, and the service.

    python benchmarks/serving.py llama [--streams 1,8,64] [--threads 1]   same model, same body, tok/s and latencies
    python benchmarks/serving.py layers [--ingresses 1,2]   simulated engine: what all above the engine costs
    python benchmarks/serving.py pools                      local-cpu-two-pools: each mode alone, then both at once

Prints Markdown. Throughput: tokens of all streams over the time from first send to last byte. Timings on a shared
machine are noisy: compare within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from service.config import ModelConfig
from tests.service import running

PROMPT = "Number {}: write a story about a lighthouse keeper."
_serial = itertools.count(time.time_ns() % 1_000_000_000)
"""No prompt is asked twice: what one path left in the engine's cache would serve the next one."""


@dataclass
class Sample:
    """One stream: when it was sent, when its tokens came, how many there were."""

    sent: float
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: str = ""


def body(tokens: int, model: str = "x") -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT.format(next(_serial))}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }


async def http_run(url: str, model: str, streams: int, tokens: int, mode: str = "") -> list[Sample]:
    timeout = aiohttp.ClientTimeout(total=900)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"x-glm-mode": mode} if mode else {}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        return await asyncio.gather(*(_stream(session, url, body(tokens, model)) for _ in range(streams)))


async def _stream(session: aiohttp.ClientSession, url: str, ask: dict[str, Any]) -> Sample:
    sample, done = Sample(time.perf_counter()), False
    try:
        async with session.post(f"{url}/v1/chat/completions", json=ask) as response:
            if response.status != 200:
                sample.failed = f"HTTP {response.status}"
                return sample
            async for line in _lines(response):
                if line.startswith(b'data: {"error'):
                    sample.failed = line.decode()[:200]
                elif line == b"data: [DONE]":
                    done = True
                elif b'"content":"' in line:
                    sample.stamps.append(time.perf_counter())
                if b'"completion_tokens"' in line:
                    sample.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError) as fault:
        sample.failed = repr(fault)
    if not done and not sample.failed:
        sample.failed = "no [DONE]"
    return sample


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for block in response.content.iter_any():
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            if line:
                yield line


def llama_params(slots: int, context: int, threads: int | None) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(ModelConfig().file())
    params.n_parallel, params.n_ctx, params.verbosity = slots, slots * context, 0
    params.cache_ram_mib = 0
    params.n_batch = 512
    if threads:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    # A listener with as many threads as streams, as `llama-server -np N` would be given.
    params.n_threads_http = slots + 4
    return params


def raw_run(server: Any, streams: int, tokens: int) -> list[Sample]:
    samples = []

    def one(index: int) -> None:
        sample = Sample(time.perf_counter())
        samples.append(sample)

        def on_chunk(chunk: bytes) -> bool:
            if b'"content":"' in chunk:
                sample.stamps.append(time.perf_counter())
            if b'"completion_tokens"' in chunk:
                sample.tokens = json.loads(chunk)["usage"]["completion_tokens"]
            return False

        server.handle_chat_completions(json.dumps(body(tokens)).encode(), on_chunk)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples


@dataclass(frozen=True)
class Result:
    name: str
    streams: int
    tok_s: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    itl_p95: float
    failed: int

    def row(self, base: float | None) -> str:
        share = f"{self.tok_s / base:.1%}" if base else ""
        ms = [f"{1e3 * v:.1f}" for v in (self.ttft_p50, self.ttft_p95, self.itl_p50, self.itl_p95)]
        return (
            f"| {self.streams} | {self.name} | {self.tok_s:.1f} | {share} | " + " | ".join(ms) + f" | {self.failed} |"
        )


def summarise(name: str, samples: list[Sample]) -> Result:
    good = [s for s in samples if not s.failed and s.stamps]
    span = max(s.stamps[-1] for s in good) - min(s.sent for s in samples)
    firsts = [s.stamps[0] - s.sent for s in good]
    gaps = [b - a for s in good for a, b in zip(s.stamps, s.stamps[1:], strict=False)] or [0.0]
    return Result(
        name,
        len(samples),
        sum(s.tokens for s in good) / span,
        statistics.median(firsts),
        quantile(firsts, 0.95),
        statistics.median(gaps),
        quantile(gaps, 0.95),
        len(samples) - len(good),
    )


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def median_of(runs: list[Result]) -> Result:
    return sorted(runs, key=lambda r: r.tok_s)[len(runs) // 2]


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"{what} ...", file=sys.stderr, end=" ", flush=True)
    yield
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


RAW, PEER, OURS = "raw, in process", "llama.cpp's HTTP server", "glm5 serve"


def llama(streams: list[int], tokens: int, repeats: int, context: int, threads: int | None) -> None:
    """Every repeat runs each path in turn and alone: two on two cores would measure each other."""
    slots = max(streams)
    runs: dict[tuple[int, str], list[Result]] = {}
    settings = [
        f"pools.shared.slots={slots}",
        f"model.context_tokens={context}",
        "pools.shared.engine.prefix_cache_mib=0",
        *([f"pools.shared.engine.threads={threads}"] if threads else []),
    ]
    for repeat in range(repeats):

        def measure(name: str, run: Callable[[int], list[Sample]], repeat: int = repeat) -> None:
            run(min(2, slots))
            for c in streams:
                with progress(f"{name} C={c}, {repeat + 1} of {repeats}"):
                    runs.setdefault((c, name), []).append(summarise(name, run(c)))

        _engine_only(measure, slots, context, threads, tokens)
        with running(sets=settings) as service:
            url, model = service.url, service.model
            measure(OURS, lambda c, url=url, model=model: asyncio.run(http_run(url, model, c, tokens)))  # type: ignore[misc]
    print(f"\n{tokens} tokens a stream, median (least to most) of {repeats} interleaved repeats, ", end="")
    print(f"{threads or 'all'} threads; share is of the best engine-only path\n")
    print("| streams | path | tok/s | least to most | share | TTFT p50 ms | p95 | ITL p50 ms | p95 | failed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for c in streams:
        best = max(median_of(runs[c, name]).tok_s for name in (RAW, PEER))
        for name in (RAW, PEER, OURS):
            print(spread_row(runs[c, name], best))


def _engine_only(measure: Callable[..., None], slots: int, context: int, threads: int | None, tokens: int) -> None:
    """llama.cpp without us. Its model and threads are gone when this returns."""
    import xllamacpp

    server = xllamacpp.Server(llama_params(slots, context, threads))
    measure(RAW, lambda c: raw_run(server, c, tokens))
    url = server.listening_address
    measure(PEER, lambda c: asyncio.run(http_run(url, "x", c, tokens)))


def spread_row(runs: list[Result], best: float) -> str:
    middle = median_of(runs)
    least, most = min(run.tok_s for run in runs), max(run.tok_s for run in runs)
    ms = [f"{1e3 * v:.1f}" for v in (middle.ttft_p50, middle.ttft_p95, middle.itl_p50, middle.itl_p95)]
    failed = sum(run.failed for run in runs)
    cells = [f"{middle.tok_s:.1f}", f"{least:.1f} to {most:.1f}", f"{middle.tok_s / best:.1%}", *ms, str(failed)]
    return f"| {middle.streams} | {middle.name} | " + " | ".join(cells) + " |"


def layers(streams: list[int], tokens: int, repeats: int, ingresses: list[int]) -> None:
    """Simulated engine, 20 ms a step whatever the batch: what all above the engine costs."""
    base = [
        "pools.shared.engine={name: simulated, step_ms: 20}",
        f"pools.shared.slots={max(streams)}",
        "admission.queue_requests=4096",
    ]
    runs: dict[tuple[int, int], list[tuple[Result, float]]] = {}
    for _ in range(repeats):
        for ingress in ingresses:
            with running(sets=[*base, f"ingress.replicas={ingress}"]) as service:
                model = service.model
                asyncio.run(http_run(service.url, model, 8, 8))
                for c in streams:
                    with progress(f"{ingress} ingresses, {c} streams"):
                        before = cpu_seconds(service.process.pid)
                        samples = asyncio.run(http_run(service.url, model, c, tokens))
                        spent = cpu_seconds(service.process.pid) - before
                    for reason in {sample.failed for sample in samples if sample.failed}:
                        print(f"failed: {reason}", file=sys.stderr)
                    each = spent / max(1, sum(sample.tokens for sample in samples))
                    runs.setdefault((ingress, c), []).append((summarise("", samples), each))
    print(f"\n{tokens} tokens a stream, median of {repeats} (least to most)\n")
    print("| ingresses | streams | tok/s | least to most | of offered | CPU µs a token | TTFT p95 ms | failed |")
    print("|---|---|---|---|---|---|---|---|")
    for (ingress, c), found in runs.items():
        result = median_of([one for one, _ in found])
        rates = [one.tok_s for one, _ in found]
        cpu = statistics.median(each for _, each in found)
        print(
            f"| {ingress} | {c} | {result.tok_s:.0f} | {min(rates):.0f} to {max(rates):.0f} "
            f"| {result.tok_s / (c / 0.020):.0%} | {1e6 * cpu:.0f} | {1e3 * result.ttft_p95:.0f} "
            f"| {sum(one.failed for one, _ in found)} |"
        )


TWO_POOLS = "deployments/profiles/local-cpu-two-pools.yaml"


def pools(streams: list[int], tokens: int, repeats: int) -> None:
    """llama.cpp for latency beside vLLM for throughput in one service on the same cores."""
    with running(TWO_POOLS, within_s=400) as service:

        def run(mode: str, c: int, length: int = tokens) -> list[Sample]:
            return asyncio.run(http_run(service.url, service.model, c, length, mode))

        for mode in ("latency", "throughput"):
            run(mode, 2, 8)
        print("| streams | mode | tok/s | share of latency | TTFT p50 ms | p95 | ITL p50 ms | p95 | failed |")
        print("|---|---|---|---|---|---|---|---|---|")
        for c in streams:
            base: float | None = None
            for mode in ("latency", "throughput"):
                with progress(f"{mode} C={c}"):
                    found = median_of([summarise(mode, run(mode, c)) for _ in range(repeats)])
                print(found.row(base), flush=True)
                base = base or found.tok_s

        async def both() -> tuple[list[Sample], list[Sample]]:
            batch = asyncio.create_task(http_run(service.url, service.model, max(streams), tokens, "throughput"))
            await asyncio.sleep(3)
            one = await http_run(service.url, service.model, 1, tokens, "latency")
            return one, await batch

        one, batch = asyncio.run(both())
        print(summarise("latency, beside the batch", one).row(None))
        print(summarise("throughput, beside that one", batch).row(None))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all below it, seconds."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("llama", "layers", "pools"))
    parser.add_argument("--streams", default=None)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=None, help="of the engine; fewer than cores leave room for us")
    parser.add_argument("--ingresses", default="1")
    asked = parser.parse_args()
    numbers = [int(n) for n in (asked.streams or ("256,1000" if asked.what == "layers" else "1,8,64")).split(",")]
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    if asked.what == "llama":
        llama(numbers, asked.tokens or 48, asked.repeats, asked.context, asked.threads)
    elif asked.what == "pools":
        pools(numbers, asked.tokens or 96, asked.repeats)
    else:
        layers(numbers, asked.tokens or 64, asked.repeats, [int(n) for n in asked.ingresses.split(",")])


if __name__ == "__main__":
    main()
