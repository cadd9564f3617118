"""The dashboard *Serving*: is the service good to its users now, and if not, which part of it."""

from __future__ import annotations

from dashboards import native
from dashboards import promql as q
from dashboards.panels import Board, Panel, Query, Row, Variable


def board() -> Board:
    return Board(
        uid="glm5-serving",
        title="GLM-5 Serving",
        about="One service: its promises, its traffic, its speed at each concurrency, and what its parts decide.",
        rows=(_slo(), _throughput(), _traffic(), _latency(), _router(), _scaling(), _engine(), _decode(), native.row()),
        variables=(
            Variable("job", "job", "glm_replica_starts_total"),
            Variable("pool", "pool", 'glm_replica_starts_total{job="$job"}', many=True),
        ),
    )


def _slo() -> Row:
    return Row(
        "Service level",
        (
            Panel(
                "First token within budget",
                f"Share of streamed requests whose first token came within {q.TTFT_BUDGET_S:g} s of arrival, queueing "
                f"included. Objective: {q.TTFT_OBJECTIVE:.0%}.",
                (Query(q.share_within(q.TTFT_BUDGET_S), "within budget"),),
                *("percentunit", "stat", 5, 5),
                high=1,
                red=q.TTFT_OBJECTIVE,
                red_below=True,
            ),
            Panel(
                "Error ratio",
                "Requests that failed by our fault, of all that ended. Refusals for load are not in it.",
                (Query(q.errors(), "errors"),),
                *("percentunit", "stat", 5, 5),
                red=q.ERROR_RATIO_LIMIT,
            ),
            Panel(
                "Output tok/s",
                "Tokens generated per second, all replicas.",
                (Query(q.total(q.rate("glm_output_tokens_total")), "tok/s"),),
                *("suffix: tok/s", "stat", 5, 5),
            ),
            Panel(
                "Replicas ready",
                "Engine replicas that can serve.",
                (Query(f"sum(glm_replicas_ready{{{q.POOL}}})", "ready"),),
                *("short", "stat", 4, 5),
                red=1,
                red_below=True,
            ),
            Panel(
                "In flight",
                "Requests that have arrived and not ended, waiting ones included.",
                (Query(f"sum(glm_requests_in_flight{{{q.JOB}}})", "in flight"),),
                *("short", "stat", 5, 5),
            ),
        ),
    )


def _throughput() -> Row:
    return Row(
        "Output tok/s at a given concurrency",
        (
            Panel(
                "Tok/s of a replica by concurrency",
                "Tokens over the seconds in which a replica was decoding that many requests. Time and tokens are "
                "booked at every change of the number of decoding requests, so this needs no quiet benchmark.",
                (Query(q.at_concurrency(), "{{concurrency}} at once"),),
                "suffix: tok/s",
                width=12,
                height=9,
            ),
            Panel(
                "The curve: last hour against 7 days ago",
                "The same figure over the last hour, and over the same hour a week ago. Bars shorter than last week's "
                "at the same concurrency are a loss of speed, whatever the traffic. Bars stand at their bucket's first "
                "number: 3 is 3 to 4 at once.",
                (
                    Query(q.with_lower_bound(q.at_concurrency("1h")), "last hour"),
                    Query(q.with_lower_bound(q.at_concurrency("1h", q.WEEK)), "7 days ago"),
                    Query(
                        q.with_lower_bound(f"max by (concurrency) (glm_predicted_tokens_per_second{{{q.POOL}}})"),
                        "planned",
                    ),
                ),
                *("suffix: tok/s", "bars", 12, 9),
                by="from",
                beside=("concurrency",),
            ),
            Panel(
                "Share of decoding time at each concurrency",
                "Of the seconds in which a replica was decoding at all, how they split over the number of requests.",
                (Query(q.total(q.rate("glm_busy_seconds_by_concurrency_total"), "concurrency"), "{{concurrency}}"),),
                "s",
                width=8,
                stacked="percent",
            ),
            Panel(
                "Against 7 days ago, at the same concurrency",
                "1 is the speed of a week ago at that concurrency; below 0.9 for half an hour an alert fires.",
                (Query(f"({q.at_concurrency('1h')}) / ({q.at_concurrency('1h', q.WEEK)})", "{{concurrency}} at once"),),
                "percentunit",
            ),
            Panel(
                "Output tok/s now and 7 days ago",
                "Tokens generated per second, all replicas. This one follows the traffic.",
                (
                    Query(q.total(q.rate("glm_output_tokens_total")), "now"),
                    Query(q.total(q.rate("glm_output_tokens_total", offset=q.WEEK)), "7 days ago"),
                ),
                "suffix: tok/s",
            ),
        ),
    )


def _traffic() -> Row:
    return Row(
        "Traffic",
        (
            Panel(
                "Requests by outcome",
                "Requests that ended, per second.",
                (Query(q.total(q.rate("glm_requests_total", q.JOB), "outcome"), "{{outcome}}"),),
                "reqps",
                stacked="normal",
            ),
            Panel(
                "Tokens per second by tier",
                "Generated tokens, and prompt tokens read.",
                (
                    Query(q.total(q.rate("glm_output_tokens_total"), "tier"), "output, {{tier}}"),
                    Query(q.total(q.rate("glm_prompt_tokens_total"), "tier"), "prompt, {{tier}}"),
                ),
                "suffix: tok/s",
            ),
            Panel(
                "Requests in flight, queued and decoding",
                "In flight: arrived and not ended. Queued: waiting for a slot. Decoding: producing tokens.",
                (
                    Query(f"sum(glm_requests_in_flight{{{q.JOB}}})", "in flight"),
                    Query(f"sum(glm_requests_queued{{{q.POOL}}})", "queued"),
                    Query(f"sum(glm_requests_decoding{{{q.POOL}}})", "decoding"),
                ),
            ),
            Panel(
                "Refusals by reason",
                "Requests refused before they had a slot, per second.",
                (Query(q.total(q.rate("glm_rejections_total", q.JOB), "reason"), "{{reason}}"),),
                "reqps",
                stacked="normal",
            ),
            Panel(
                "Share of prompt tokens from cache",
                "Prompt tokens that an engine's prefix cache already held.",
                (
                    Query(
                        f"{q.total(q.rate('glm_prompt_cached_tokens_total'), 'pool')} / "
                        f"({q.total(q.rate('glm_prompt_tokens_total'), 'pool')} > 0)",
                        "{{pool}}",
                    ),
                ),
                "percentunit",
                high=1,
            ),
            Panel(
                "Queue by pool",
                "Requests that wait for a slot.",
                (Query(f"sum by (pool) (glm_requests_queued{{{q.POOL}}})", "{{pool}}"),),
            ),
        ),
    )


def _quantiles(title: str, help: str, metric: str, *, width: int = 8) -> Panel:
    queries = (
        *(Query(q.quantile(level, metric, "tier"), f"p{level * 100:.0f} {{{{tier}}}}") for level in (0.5, 0.95, 0.99)),
    )
    return Panel(title, help, queries, "s", width=width)


def _latency() -> Row:
    return Row(
        "Latency, by tier",
        (
            _quantiles(
                "Time to first token (TTFT)", "Arrival to first token of streamed requests.", "glm_ttft_seconds"
            ),
            _quantiles(
                "Inter-token latency (ITL)",
                "Gap before each further token; a chunk of k tokens is k gaps.",
                "glm_itl_seconds",
            ),
            _quantiles("End to end (E2EL)", "Arrival to end of requests that ended well.", "glm_e2el_seconds"),
            _quantiles("Wait for admission", "Arrival to a slot.", "glm_queue_seconds"),
            Panel(
                "First tokens by time",
                "How many streamed requests had their first token after how long.",
                (Query(q.total(q.rate("glm_ttft_seconds_bucket"), "le"), "{{le}}"),),
                "s",
                "heatmap",
            ),
            Panel(
                "First token within budget, by pool and tier",
                f"Share within {q.TTFT_BUDGET_S:g} s.",
                (Query(q.share_within(q.TTFT_BUDGET_S, "pool", "tier"), "{{pool}} {{tier}}"),),
                "percentunit",
                high=1,
            ),
        ),
    )


def _router() -> Row:
    return Row(
        "Router",
        (
            Panel(
                "Pools chosen, by reason",
                "Routing decisions per second.",
                (Query(q.total(q.rate("glm_routing_decisions_total"), "pool", "reason"), "{{pool}}: {{reason}}"),),
                "reqps",
                width=12,
                stacked="normal",
            ),
            Panel(
                "Slots and requests inside engines",
                "A pool whose requests stay at its slots is full.",
                (
                    Query(f"sum by (pool) (glm_slots{{{q.POOL}}})", "slots, {{pool}}"),
                    Query(f"sum by (pool) (glm_requests_running{{{q.POOL}}})", "running, {{pool}}"),
                ),
                width=12,
            ),
        ),
    )


def _scaling() -> Row:
    return Row(
        "Autoscaling",
        (
            Panel(
                "Replicas",
                "Ready, wanted, and the most that are allowed.",
                (
                    Query(f"sum by (pool) (glm_replicas_ready{{{q.POOL}}})", "ready, {{pool}}"),
                    Query(f"max by (pool) (glm_replicas_target{{{q.POOL}}})", "wanted, {{pool}}"),
                    Query(f"max by (pool) (glm_replicas_max{{{q.POOL}}})", "at most, {{pool}}"),
                ),
            ),
            Panel(
                "Scaling and conversion decisions",
                "Decisions per hour with their reasons; `hold` is left out.",
                (
                    Query(
                        "sum by (pool, direction, reason) (increase("
                        f'glm_scaling_decisions_total{{{q.POOL},direction!="hold"}}[1h]))',
                        "{{pool}} {{direction}}: {{reason}}",
                    ),
                    Query(
                        f"sum by (mode, done, reason) (increase(glm_conversion_decisions_total{{{q.JOB}}}[1h]))",
                        "convert to {{mode}} ({{done}}): {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Replica starts",
                "Replicas started in the last hour. More than scaling explains is flapping.",
                (Query(f"sum by (pool) (increase(glm_replica_starts_total{{{q.POOL}}}[1h]))", "{{pool}}"),),
            ),
        ),
    )


def _engine() -> Row:
    return Row(
        "Engine",
        (
            Panel(
                "KV cache in use, fullest replica",
                "Share of the KV cache that holds live requests (engines with a shared KV pool).",
                (Query(f"max by (pool) (glm_kv_used_ratio{{{q.POOL}}})", "{{pool}}"),),
                "percentunit",
                high=1,
            ),
            Panel(
                "Time of a start, by phase",
                "Mean seconds of each phase of a replica's start, over all starts so far.",
                (
                    Query(
                        f"sum by (pool, phase) (glm_load_phase_seconds_sum{{{q.POOL}}}) / "
                        f"sum by (pool, phase) (glm_load_phase_seconds_count{{{q.POOL}}})",
                        "{{pool}} {{phase}}",
                    ),
                ),
                "s",
                stacked="normal",
            ),
            Panel(
                "Slow fallback kernels",
                "1 where an engine runs without its compiled kernels: some 30 times slower, without an error.",
                (Query(f"max by (pool) (glm_kernel_fallback{{{q.POOL}}})", "{{pool}}"),),
                high=1,
            ),
        ),
    )


def _decode() -> Row:
    return Row(
        "Decode budget",
        (
            Panel(
                "Decode step: measured and predicted",
                "Measured by the engine; predicted by the step model for the batch of the moment.",
                (
                    Query(q.quantile(0.5, "glm_decode_step_seconds", "pool"), "p50, {{pool}}"),
                    Query(q.quantile(0.95, "glm_decode_step_seconds", "pool"), "p95, {{pool}}"),
                    Query(f"max by (pool) (glm_decode_step_predicted_seconds{{{q.POOL}}})", "predicted, {{pool}}"),
                ),
                "s",
                width=12,
            ),
            Panel(
                "Speculative decoding (MTP): acceptance",
                "Share of drafted tokens that were kept.",
                (
                    Query(
                        f"{q.total(q.rate('glm_speculative_accepted_tokens_total'), 'pool')} / "
                        f"({q.total(q.rate('glm_speculative_drafted_tokens_total'), 'pool')} > 0)",
                        "{{pool}}",
                    ),
                ),
                "percentunit",
                width=6,
                high=1,
            ),
            Panel(
                "Speculative decoding (MTP): tokens",
                "Drafted and kept, per second.",
                (
                    Query(q.total(q.rate("glm_speculative_drafted_tokens_total"), "pool"), "drafted, {{pool}}"),
                    Query(q.total(q.rate("glm_speculative_accepted_tokens_total"), "pool"), "kept, {{pool}}"),
                ),
                "suffix: tok/s",
                width=6,
            ),
        ),
    )
