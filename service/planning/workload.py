"""Requests for a fleet simulation: a trace file, or a Poisson stream with known lengths."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, cast

from service.errors import UserError
from service.types import TIERS, Tier

Mode = Literal["latency", "throughput"]
# Header names -> ours; the second set is that of the public Azure LLM inference traces.
COLUMNS = {
    "arrived_s": "arrived", "prompt_tokens": "prompt", "output_tokens": "output", "tier": "tier", "mode": "mode",
    "TIMESTAMP": "arrived", "ContextTokens": "prompt", "GeneratedTokens": "output",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `arrived` seconds since the start; `tier` None means the client left it to the service (auto)."""

    arrived: float
    prompt: int
    output: int
    tier: Tier | None = None
    mode: Mode | None = None


def read(source: str, seed: int = 1) -> list[Arrival]:
    """A CSV file (columns arrived_s, prompt_tokens, output_tokens and optionally tier, mode; or an Azure LLM trace), or
    `poisson:RATE:SECONDS[:PROMPT:OUTPUT[:PRIORITY_SHARE]]`. Sorted by arrival, starting at 0. Raises UserError."""
    if source.startswith("poisson:"):
        return list(poisson(source, seed))
    path = Path(source)
    if not path.is_file():
        raise UserError(f"no trace {source}; give a CSV file or poisson:RATE:SECONDS, such as poisson:50:600")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        names = {COLUMNS[n]: n for n in reader.fieldnames or () if n in COLUMNS}
        missing = {"arrived", "prompt", "output"} - set(names)
        if missing:
            wanted = "columns: arrived_s, prompt_tokens, output_tokens[, tier, mode]"
            raise UserError(f"{source}: no column for {', '.join(sorted(missing))}; {wanted}")
        found = [_row(source, i, row, names) for i, row in enumerate(reader, 2)]
    if not found:
        raise UserError(f"{source} holds no requests")
    first = min(a.arrived for a in found)
    shifted = (Arrival(a.arrived - first, a.prompt, a.output, a.tier, a.mode) for a in found)
    return sorted(shifted, key=lambda a: a.arrived)


def _row(source: str, line: int, row: dict[str, str], names: dict[str, str]) -> Arrival:
    tier = (row.get(names.get("tier", "")) or "").strip() or None
    mode = (row.get(names.get("mode", "")) or "").strip() or None
    try:
        arrived = _seconds(row[names["arrived"]])
        prompt, output = int(float(row[names["prompt"]])), int(float(row[names["output"]]))
        if not math.isfinite(arrived) or prompt < 0 or output < 1:
            raise ValueError("needs a finite time, prompt >= 0 and output >= 1")
    except (ValueError, TypeError) as fault:
        raise UserError(f"{source}, line {line}: {fault}") from None
    if tier not in (None, "auto", *TIERS):
        raise UserError(f"{source}, line {line}: tier {tier!r} is not one of {', '.join(TIERS)}, auto")
    if mode not in (None, "latency", "throughput"):
        raise UserError(f"{source}, line {line}: mode {mode!r} is not latency or throughput")
    return Arrival(arrived, prompt, output, None if tier == "auto" else cast(Tier, tier), cast("Mode | None", mode))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()[:26]).timestamp()


def poisson(source: str, seed: int) -> Iterator[Arrival]:
    """Independent arrivals at RATE a second; prompt and output lengths are log-normal with the given means (1000, 250)
    and a coefficient of variation of 1; PRIORITY_SHARE (0.1) asks for priority, as much for flex."""
    try:
        numbers = [float(part) for part in source.split(":")[1:]]
    except ValueError:
        raise UserError(f"{source}: write poisson:RATE:SECONDS[:PROMPT:OUTPUT[:PRIORITY_SHARE]] with numbers") from None
    if not 2 <= len(numbers) <= 5 or min(numbers) < 0 or numbers[0] <= 0 or numbers[1] <= 0:
        raise UserError(f"{source}: write poisson:RATE:SECONDS[:PROMPT:OUTPUT[:PRIORITY_SHARE]]")
    rate, seconds, prompt, output, share = [*numbers, *(1000.0, 250.0, 0.1)[len(numbers) - 2 :]]
    rng = random.Random(seed)
    sigma = math.sqrt(math.log(2.0))
    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        draw = rng.random()
        tier: Tier | None = "priority" if draw < share else "flex" if draw < 2 * share else None
        lengths = [max(1, round(mean * rng.lognormvariate(-sigma * sigma / 2, sigma))) for mean in (prompt, output)]
        yield Arrival(now, lengths[0], lengths[1], tier)
