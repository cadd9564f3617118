"""vLLM's own numbers, as its scheduler reports them after each step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Books:
    """Counters since load; written by vLLM's logging hook, read by VllmEngine.stats."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    steps: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    beat: float = 0.0

    def record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self.running, self.waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            self.kv_used = scheduler.kv_cache_usage
            drafts = scheduler.spec_decoding_stats
            if drafts is not None:
                self.drafted += drafts.num_draft_tokens
                self.accepted += drafts.num_accepted_tokens
        if iteration is not None:
            self.steps += 1
            self.output_tokens += iteration.num_generation_tokens
            self.prompt_tokens += iteration.num_prompt_tokens
            self.beat = time.monotonic()


def stat_logger(books: Books) -> Any:
    """A factory as vLLM wants it, that writes to `books`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Hook(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            books.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Hook
