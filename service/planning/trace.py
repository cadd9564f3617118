"""Seconds by cause from a torch profiler trace (Chrome JSON, plain or .gz), as vLLM's profiler writes one a rank.

On GPUs: the kernels. On vLLM's CPU build: the outermost operators of the thread that computes.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from service.errors import UserError

CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("allreduce", re.compile(r"nccl|all_?reduce|cross_device_reduce|one_?shot|two_?shot|multimem", re.I)),
    ("attention", re.compile(r"attn|attention|mla|flash|paged|softmax", re.I)),
    (
        "gemm",
        re.compile(
            r"gemm|gemv|matmul|mul_mat|addmm|aten::b?mm|onednn|cutlass|cublas|wgmma|moe|marlin|q\d_k|kquant|linear|nvjet"
            # our own: experts (the list of who goes where and the sum included), decoding for cuBLAS
            r"|xmma|^w13_|^w2_(pair|group)|^(prepare|sum|rows|scale|unscale)_kernel",
            re.I,
        ),
    ),
)


def read_trace(path: Path) -> dict[str, float]:
    """Seconds by cause over the whole trace: allreduce, attention, gemm, other, idle (gaps in between). Kernels that
    overlap on several streams count once, for the one that began first. Raises UserError."""
    try:
        raw = path.read_bytes()
        events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as fault:
        raise UserError(f"{path} is not a torch profiler trace: {type(fault).__name__} {fault}") from None
    split = split_events(events)
    if not split:
        raise UserError(f"{path} has neither GPU kernels nor operators; profile while requests are being decoded")
    return split


def split_events(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The same, from events with `cat`, `name`, `ts` and `dur` (microseconds)."""
    timed = [e for e in events if "dur" in e and "ts" in e]
    chosen = [e for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")] or _operators(timed)
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"]), cause(str(e.get("name", "")))) for e in chosen)
    if not spans:
        return {}
    seconds = dict.fromkeys((*(name for name, _ in CLASSES), "other", "idle"), 0.0)
    end = spans[0][0]
    for begin, stop, kind in spans:
        if begin > end:
            seconds["idle"] += begin - end
        if stop > end:
            seconds[kind] += stop - max(begin, end)
            end = stop
    return {k: v * 1e-6 for k, v in seconds.items()}


def _operators(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators of the thread that spends most time in them: a rank on CPUs computes from one thread."""
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    spent: defaultdict[tuple[Any, Any], float] = defaultdict(float)
    for event in operators:
        spent[event.get("pid"), event.get("tid")] += float(event["dur"])
    if not spent:
        return []
    busiest = max(spent, key=spent.__getitem__)
    return [e for e in operators if (e.get("pid"), e.get("tid")) == busiest]


def cause(name: str) -> str:
    return next((kind for kind, pattern in CLASSES if pattern.search(name)), "other")
