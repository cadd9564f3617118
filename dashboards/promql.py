"""PromQL that several panels share. `$job`, `$pool` and `$__rate_interval` are Grafana's variables.

TTFT_BUDGET_S and the objectives are the service level that panels and alerts measure against; alerts.yml repeats the
figures, and a test holds the two together.
"""

from __future__ import annotations

TTFT_BUDGET_S = 2.0
TTFT_OBJECTIVE = 0.95
"""Share of streamed requests that must have their first token within TTFT_BUDGET_S, queueing included."""

ERROR_OUTCOMES = ("internal_error", "engine_failed", "deadline_exceeded", "not_ready", "error")
"""Outcomes that are our failure. A refusal for load (`overloaded`) or a bad request is not one."""
ERROR_RATIO_LIMIT = 0.02

JOB = 'job="$job"'
POOL = 'job="$job",pool=~"$pool"'
WINDOW = "$__rate_interval"
WEEK = " offset 7d"


def rate(metric: str, where: str = POOL, window: str = WINDOW, offset: str = "") -> str:
    return f"rate({metric}{{{where}}}[{window}]{offset})"


def total(expression: str, *by: str) -> str:
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def quantile(q: float, histogram: str, *by: str, where: str = POOL) -> str:
    buckets = total(rate(f"{histogram}_bucket", where), "le", *by)
    return f"histogram_quantile({q}, {buckets})"


def at_concurrency(window: str = WINDOW, offset: str = "") -> str:
    """Output tok/s of a replica while it decodes that many requests: tokens over the seconds spent there."""
    tokens = total(rate("glm_output_tokens_by_concurrency_total", POOL, window, offset), "concurrency")
    seconds = total(rate("glm_busy_seconds_by_concurrency_total", POOL, window, offset), "concurrency")
    return f"{tokens} / ({seconds} > 0)"


def with_lower_bound(expression: str) -> str:
    """Adds the label `from`: the first number of `concurrency` (3 for 3-4), which can be sorted as a number."""
    return f'label_replace({expression}, "from", "$1", "concurrency", "([0-9]+).*")'


def share_within(budget_s: float, *by: str) -> str:
    """Share of streamed requests whose first token came within the budget (a bucket's bound)."""
    within = total(rate("glm_ttft_seconds_bucket", f'{POOL},le="{budget_s}"'), *by)
    return f"{within} / ({total(rate('glm_ttft_seconds_count'), *by)} > 0)"


def errors() -> str:
    ours = "|".join(ERROR_OUTCOMES)
    # `or` keeps the line at zero while no request has failed yet: a series that does not exist is not a failure.
    failed = total(rate("glm_requests_total", f'{JOB},outcome=~"{ours}"'))
    every = total(rate("glm_requests_total", JOB))
    return f"({failed} or 0 * {every}) / ({every} > 0)"
