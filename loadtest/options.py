"""From the words of the command line to plans: every check of an option, in one place. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loadtest.metrics import SLO_METRICS
from loadtest.plan import Level, order
from service.errors import UserError

_RAMP_MAX_S = 30.0
_OPEN_LOOP_S = 30.0


def numbers(text: str, option: str) -> list[int]:
    """`1,2,10` as positive whole numbers without repetition."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} {text!r}: give whole numbers with commas between, like 1,2,10,64") from error
    if min(values) < 1 or len(set(values)) != len(values):
        raise UserError(f"{option} {text!r}: numbers must be positive and different")
    return values


def rates(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--rate {text!r}: give requests per second with commas between, like 0.5,1,2") from error
    if not all(0 < value < 1e5 for value in values) or len(set(values)) != len(values):
        raise UserError(f"--rate {text!r}: rates must be positive and different")
    return values


def slo(text: str) -> dict[str, float]:
    """`ttft=500,tpot=50` (milliseconds) to seconds by metric."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[name.strip()] = float(value) / 1e3
        except ValueError as error:
            raise UserError(f"--slo {text!r}: write limits in milliseconds like ttft=500,tpot=50") from error
        if name.strip() not in SLO_METRICS:
            raise UserError(f"--slo: no metric {name.strip()!r}; known: {', '.join(SLO_METRICS)}")
    return limits


def seed(given: int | None) -> int:
    """A fresh seed by default: the same prompts twice would meet a warm prefix cache the second time."""
    return int(time.time()) if given is None else given


def levels(
    concurrencies: Sequence[int],
    open_rates: Sequence[float],
    *,
    requests: int | None,
    duration_s: float | None,
    repeats: int,
    warmup: int,
    e2el_s: float,
    timeout_s: float,
    first_repeat: int = 0,
    first_index: int = 0,
) -> list[Level]:
    """All levels in the order of measuring. `e2el_s`: one request alone, which sets the ramp. Raises UserError."""
    if requests is not None and duration_s is not None:
        raise UserError("give --requests or --duration, not both")
    ramp_s = min(e2el_s, _RAMP_MAX_S)
    out: list[Level] = []
    for repeat, at in order(list(open_rates) or list(concurrencies), repeats):
        index = first_index + len(out)
        if open_rates:
            seconds = duration_s or (0.0 if requests else _OPEN_LOOP_S)
            # Warm-up until the first requests have ended, so that measuring begins among others in flight.
            warm = max(1, round(at * min(max(2 * e2el_s, 1.0), _RAMP_MAX_S)))
            out.append(Level(index, 0, float(at), requests or 0, seconds, warm, 0.0, timeout_s, first_repeat + repeat))
            continue
        count = int(at)
        wanted = 0 if duration_s else (requests or max(10, 4 * count))
        if wanted and wanted < count:
            raise UserError(
                f"--requests {wanted} is fewer than the {count} streams of a level: "
                f"there would be no steady window; give at least {count}"
            )
        out.append(
            Level(index, count, 0.0, wanted, duration_s or 0.0, warmup, ramp_s, timeout_s, first_repeat + repeat)
        )
    return out
