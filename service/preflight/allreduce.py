"""What the all-reduce tables mean: which algorithm vLLM takes, which is best for each mode, what is broken. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.preflight.checks import Finding
from service.preflight.probe import AllReduce, ProbeFailed

COLLAPSE = 4.0  # an all-reduce this much above the size's straight line between its neighbours is no latency
LATENCY_TOKENS, THROUGHPUT_TOKENS = (1, 4), (64, 256)


def findings(tables: Mapping[str, AllReduce | ProbeFailed], hidden: int) -> list[Finding]:
    """The crossover table in words, and what to set for each mode."""
    good = {k: v for k, v in tables.items() if isinstance(v, AllReduce) and v.table}
    found: list[Finding] = []
    for name, value in tables.items():
        if isinstance(value, ProbeFailed):
            found.append(
                Finding(
                    f"all-reduce {name}",
                    "fail" if value.hung or name == "nccl" else "warn",
                    str(value),
                    "this algorithm does not work on this box",
                    "do not select it" if name != "nccl" else "see first collective",
                )
            )
        elif value.missing:
            found.append(Finding(f"all-reduce {name}", "skip", value.missing))
    for name, value in good.items():
        found += _collapse(name, value)
    if "nccl" not in good:
        return found
    for mode, tokens in (("latency", LATENCY_TOKENS), ("throughput", THROUGHPUT_TOKENS)):
        own, best, gain = choose(good, [t * hidden * 2 for t in tokens])
        size = tokens[0] * hidden * 2
        text = f"{_at(good[own], size):.0f} µs by {own}, which vLLM takes by itself, at {size // 1024} KiB"
        if best == own or gain < 0.05:
            found.append(Finding(f"all-reduce for {mode}", "ok", f"{text}; nothing is better"))
        else:
            set_ = " ".join(f"{k}={v}" for k, v in good[best].settings.items()) or f"the engine's {best}"
            found.append(
                Finding(
                    f"all-reduce for {mode}",
                    "warn",
                    f"{text}; {best} takes {_at(good[best], size):.0f} µs",
                    f"{gain:.0%} of the all-reduce time at {tokens[0]} to {tokens[1]} tokens a step",
                    f"set {set_}",
                )
            )
    return found


def engines_own(tables: Mapping[str, object]) -> str:
    """What vLLM takes where nothing is set: its own kernel where it turns that on, else plain NCCL. (Where FlashInfer
    is installed, or eight Hopper GPUs have multicast on, vLLM asks those first; they are not measured here.)"""
    return "vllm-custom" if "vllm-custom" in tables else "nccl"


def choose(tables: Mapping[str, AllReduce], sizes: Sequence[int]) -> tuple[str, str, float]:
    """(the engine's own choice for `sizes`, the algorithm with the least total over them, share of the first one's time
    that the second saves). `tables` holds nccl's."""
    total = {name: sum(_at(t, size) for size in sizes) for name, t in tables.items() if t.table[-1][0] >= max(sizes)}
    own = engines_own(total)
    if own not in total:
        return own, own, 0.0
    best = min(total, key=lambda name: (total[name], name != own))
    return own, best, 1 - total[best] / total[own]


def _at(table: AllReduce, size: int) -> float:
    from service.planning.curves import Curve

    return Curve.of([(float(b), us) for b, us in table.table]).at(float(size))


def _collapse(name: str, value: AllReduce) -> list[Finding]:
    """Some PCIe switches collapse under posted writes: 500 µs where 30 are right."""
    rows = value.table
    smallest = rows[0][1]
    for (size, us), (_, after) in zip(rows[1:], [*rows[2:], rows[-1]], strict=False):
        if size <= 131072 and us > COLLAPSE * max(smallest, 20.0) and after > COLLAPSE * max(smallest, 20.0):
            return [
                Finding(
                    f"all-reduce {name}",
                    "warn" if name != "nccl" else "fail",
                    f"{us:.0f} µs at {size // 1024} KiB, {smallest:.0f} µs at {rows[0][0] // 1024} KiB",
                    "the link collapses under many small writes (seen with some PCIe switches)",
                    "use another algorithm at this size; newer switch firmware; GPUs under one switch",
                )
            ]
    return []
