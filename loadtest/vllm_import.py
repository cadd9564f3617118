"""Read a result file of `vllm bench serve --save-result` as a run, so that another tool's numbers lie beside ours.

With `--save-detailed` the file holds every request, and our own definitions are applied to it. Without, only the
summary that vLLM computed can be taken over (ITL then stands under ICL, which it is), and the level says so.
"""

from __future__ import annotations

import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson

from loadtest import metrics
from loadtest.answer import spread
from loadtest.metrics import Measured, Spread
from loadtest.records import Record
from loadtest.verdict import LevelSummary
from service.errors import UserError

_NEEDED = ("duration", "completed", "output_throughput", "request_throughput")


def read(path: Path) -> dict[str, Any]:
    """Raises UserError when the file is no result of vllm bench serve."""
    try:
        raw: dict[str, Any] = orjson.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    missing = [key for key in _NEEDED if not isinstance(raw, dict) or key not in raw]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: not a result of `vllm bench serve --save-result`")
    return raw


def level(raw: dict[str, Any], index: int, slo: dict[str, float]) -> tuple[LevelSummary, list[Record]]:
    """One file is one level."""
    concurrency = int(raw.get("max_concurrency") or raw.get("max_concurrent_requests") or 0)
    asked = str(raw.get("request_rate") or "inf")
    rate = 0.0 if asked == "inf" or raw.get("max_concurrency") else float(asked)
    records = _records(raw, concurrency, rate)
    if records:
        source = "vllm bench serve, per request"
        window = metrics.window_of(records, concurrency, rate > 0)
        measured = metrics.measure(records, window, slo)
        reasons = () if window else ("no steady window: fewer requests than streams",)
        notes: tuple[str, ...] = ("client load unknown: not recorded by vllm bench serve",)
    else:
        source = "vllm bench serve, summary"
        measured, reasons = _summary(raw), ()
        notes = ("rates over the whole run with ramp and drain: the file holds no requests (use --save-detailed)",)
    return (
        LevelSummary(index, 0, concurrency, rate, _when(raw), measured, source=source, reasons=reasons, notes=notes),
        records,
    )


def as_repeat(summary: LevelSummary, repeat: int) -> LevelSummary:
    """Files with the same load are repeats, in the order given."""
    return replace(summary, repeat=repeat)


def _when(raw: dict[str, Any]) -> float:
    try:
        return time.mktime(time.strptime(str(raw.get("date")), "%Y%m%d-%H%M%S"))
    except ValueError:
        return 0.0


def _records(raw: dict[str, Any], concurrency: int, rate: float) -> list[Record]:
    """One record a request, lanes reconstructed; empty when the file is not detailed."""
    columns = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
    if not all(isinstance(raw.get(name), list) for name in columns):
        return []
    out: list[Record] = []
    for number, row in enumerate(zip(*(raw[name] for name in columns), strict=True)):
        prompt, output, ttft, gaps, start, error = row
        record = Record(
            number, -1, False, start, start, asked_tokens=output, prompt_tokens=prompt, output_tokens=output
        )
        if error or not ttft:
            # vLLM lets an error event in a chat's stream pass as success with TTFT 0.
            record.error = "http" if error else "empty"
            record.detail = str(error)[-200:]
            record.end = start + sum(gaps) + ttft
        else:
            now = start + ttft
            record.times.append(now)
            for gap in gaps:
                now += gap
                record.times.append(now)
            record.tokens = spread(output, [1] * len(record.times), [])
            record.first_answer = record.times[0]
            record.end = now
            record.status = 200
        out.append(record)
    if not rate:
        assign_lanes(out)
    return out


def assign_lanes(records: list[Record]) -> None:
    """Give each request the lane that was free longest; a limit of C in flight yields at most C lanes."""
    free_at: list[float] = []
    for record in sorted(records, key=lambda r: r.sent):
        ready = [(end, lane) for lane, end in enumerate(free_at) if end <= record.sent]
        if ready:
            record.lane = min(ready)[1]
            free_at[record.lane] = record.end
        else:
            record.lane = len(free_at)
            free_at.append(record.end)


def _summary(raw: dict[str, Any]) -> Measured:
    completed, failed = int(raw["completed"]), int(raw.get("failed") or 0)
    return Measured(
        sent=completed + failed,
        ok=completed,
        failed=failed,
        cancelled=0,
        errors={"unknown": failed} if failed else {},
        window_s=raw["duration"],
        output_tok_s=raw["output_throughput"],
        peak_tok_s=raw.get("max_output_tokens_per_s"),
        request_s=raw["request_throughput"],
        input_tokens=raw.get("total_input_tokens", 0) / completed if completed else None,
        output_tokens=raw.get("total_output_tokens", 0) / completed if completed else None,
        ttft=_spread(raw, "ttft", completed),
        icl=_spread(raw, "itl", completed),
        tpot=_spread(raw, "tpot", completed),
        e2el=_spread(raw, "e2el", completed),
    )


def _spread(raw: dict[str, Any], name: str, count: int) -> Spread | None:
    """vLLM keeps mean, median and the percentiles that were asked for; the others become NaN, never a guess."""
    if f"mean_{name}_ms" not in raw:
        return None
    keys = {"mean": f"mean_{name}_ms", "p50": f"median_{name}_ms"}
    values: dict[str, Any] = {"n": count}
    for field in fields(Spread):
        if field.name != "n":
            value = raw.get(keys.get(field.name, f"{field.name}_{name}_ms"))
            values[field.name] = float("nan") if value is None else value / 1e3
    return Spread(**values)
