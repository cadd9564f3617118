"""The row with the engines' own figures, under the names that relabel.yml leaves."""

from __future__ import annotations

from dashboards.panels import Panel, Query, Row


def row() -> Row:
    return Row(
        "The engines' own figures",
        (
            Panel(
                "vLLM: running, waiting",
                "vLLM's scheduler.",
                (
                    Query("sum(vllm:num_requests_running)", "running"),
                    Query("sum(vllm:num_requests_waiting)", "waiting"),
                ),
                width=6,
            ),
            Panel(
                "vLLM: KV cache and preemptions",
                "A preempted request lost its KV cache and is computed again.",
                (
                    Query("max(vllm:kv_cache_usage_perc)", "KV in use"),
                    Query("sum(rate(vllm:num_preemptions_total[$__rate_interval]))", "preemptions per s"),
                ),
                width=6,
            ),
            Panel(
                "vLLM: step size",
                "Tokens in one step of the scheduler, prompts included.",
                (
                    Query(
                        "histogram_quantile(0.5, sum by (le) "
                        "(rate(vllm:iteration_tokens_total_bucket[$__rate_interval])))",
                        "p50",
                    ),
                ),
                width=6,
            ),
            Panel(
                "llama.cpp: tok/s, busy and deferred",
                "llama.cpp's own counters of predicted tokens, its busy slots and its deferred requests.",
                (
                    Query("sum(rate(llamacpp:tokens_predicted_total[$__rate_interval]))", "tok/s"),
                    Query("sum(llamacpp:requests_processing)", "processing"),
                    Query("sum(llamacpp:requests_deferred)", "deferred"),
                ),
                width=6,
            ),
        ),
    )
