"""How the engine is set, as far as a decode step feels it, and the constants that were calibrated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from service.errors import UserError
from service.planning.hardware import Trust
from service.planning.shape import Attention, Runtime

Family = Literal["plugin", "marlin", "hybrid", "bf16", "nvfp4-cutlass", "nvfp4-b12x", "llamacpp"]
FAMILIES: tuple[Family, ...] = ("plugin", "marlin", "hybrid", "bf16", "nvfp4-cutlass", "nvfp4-b12x", "llamacpp")

# vLLM itself captures 1, 2, 4, then every 8 to 256, then every 16 to 512 (and pads a batch up to the next size).
VLLM_CAPTURE_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
# Its performance mode "interactivity" captures every size up to 32 instead.
VLLM_INTERACTIVE_SIZES = (*range(1, 33), *VLLM_CAPTURE_SIZES[7:])

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
"""Batch sizes that get a CUDA graph: 21 where vLLM has 51, each captured twice while a start waits. Beyond 8 a batch is
padded by half at most, and by a quarter beyond 256; the weights that a step reads are the same."""
SMALL = 16
"""In interactivity every size up to this one: padding is the one user's time."""


def capture_sizes(interactive: bool, slots: int, draft_tokens: int) -> tuple[int, ...]:
    """Batch sizes captured for a pool of `slots` requests. Steps that also compute a piece of a prompt may be twice as
    large. With drafts vLLM's own list, whose sizes are multiples of the tokens that a request computes in a step."""
    if draft_tokens:
        return VLLM_INTERACTIVE_SIZES if interactive else VLLM_CAPTURE_SIZES
    most = min(2 * slots, LADDER[-1])
    small = range(1, SMALL + 1) if interactive else ()
    exact = {slots} if slots <= most else set[int]()
    return tuple(sorted({size for size in (*small, *LADDER) if size <= most} | exact))


Schedule = tuple[tuple[int, int, int], ...]
"""(first, last, tokens) ranges of batch size, in order, the first from 1: how many tokens each request drafts."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine replica.

    `slots`: requests decoded at once at most. `draft_tokens`: k of speculative decoding (0: off), the most where
    `draft_schedule` says how many at which batch size; `acceptance`: chance that a drafted token is kept, given the
    one before was. `allreduce`: "default" (untuned), "best" or an algorithm of
    the link. `kv_value_bytes`: 2 for bf16, 1 for fp8. `prefill_chunk`: prompt tokens computed in one step.
    """

    tp: int = 8
    runtime: Runtime = "vllm"
    kernels: Family = "hybrid"
    graphs: bool = True
    capture_sizes: tuple[int, ...] = VLLM_CAPTURE_SIZES
    attention: Attention = "dense"
    allreduce: str = "default"
    kv_value_bytes: float = 2.0
    draft_tokens: int = 0
    draft_schedule: Schedule = ()
    acceptance: float = 0.62  # fitted to published GLM-5 rows with 3 drafts; the service's own metrics say the truth
    slots: int = 256
    prefill_chunk: int = 2048

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise UserError(f"tensor parallelism must be at least 1, not {self.tp}")
        if self.kernels not in FAMILIES:
            raise UserError(f"unknown kernels {self.kernels!r}; known: {', '.join(FAMILIES)}")
        if not 0 <= self.draft_tokens <= 16:
            raise UserError(f"draft tokens must be 0 to 16, not {self.draft_tokens}")
        if not 0.0 <= self.acceptance < 1.0:
            raise UserError(f"acceptance must be at least 0 and below 1, not {self.acceptance}")
        if self.slots < 1:
            raise UserError(f"slots must be at least 1, not {self.slots}")

    @property
    def tokens_per_step(self) -> float:
        """Expected output tokens of one request in one step with the longest draft: 1 + a + a^2 + ... + a^k."""
        return self._kept(self.draft_tokens)

    def tokens_per_step_of(self, running: int) -> float:
        """The same in a batch of `running` requests."""
        return self._kept(self.drafts(running))

    def drafts(self, running: int) -> int:
        """Tokens that each of `running` requests drafts. Between two ranges of the schedule, and beyond the last, the
        range before goes on, as in vLLM."""
        length = self.draft_tokens
        for first, _, tokens in self.draft_schedule:
            if first > running:
                break
            length = min(tokens, self.draft_tokens)
        return length

    def _kept(self, drafted: int) -> float:
        return sum(self.acceptance**i for i in range(drafted + 1))

    def padded(self, tokens: int) -> tuple[int, bool]:
        """Tokens that the step really computes, and whether it runs as a CUDA graph."""
        if not self.graphs:
            return tokens, False
        for size in self.capture_sizes:
            if size >= tokens:
                return size, True
        return tokens, False


@dataclass(frozen=True, slots=True)
class Calibration:
    """Constants of a step that no header or datasheet holds. Each default says where it comes from.

    `trust`: how far predictions made with it were tested: "calibrated" after a back-test on rows of the same kind.
    """

    # Launches per layer beyond the GEMMs in the table (norms, rope, attention, top-k, cache write) and the idle gap
    # before each inside a graph: 1.89 ms per step for 30 layers of SmolLM2 on one H200 is 63 us a layer, 16 launches.
    launches_per_layer: float = 10.0
    graph_gap_s: float = 2.0e-6
    # Host time per layer without graphs: SmolLM2 on H200, 15.9 ms for 30 layers (vLLM 0.29).
    eager_layer_s: float = 530e-6
    # Per step and per running request (scheduler, sampling, detokenising, HTTP): SmolLM2 on H200, graph, C=1 to 256.
    host_step_s: float = 0.3e-3
    host_request_s: float = 26e-6
    # Share of bandwidth that attention reaches on the KV cache.
    kv_efficiency: float = 0.5
    kernel_scale: float = 1.0
    allreduce_scale: float = 1.0
    # nvfp4 families: share of datasheet bandwidth on experts, by tokens, and on everything else.
    moe_efficiency: tuple[tuple[float, float], ...] = ((1.0, 0.6), (64.0, 0.6))
    linear_efficiency: float = 0.7
    layer_overhead_s: float = 0.0
    error: float | None = None
    source: str = "defaults: measured on one H200, transferred"
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        return self.error is not None

    def band(self, trust: Trust) -> float:
        """Relative half-width of the error band of tok/s: the back-test's error, else 30 % (50 % on assumed parts)."""
        if self.error is not None:
            return max(0.05, self.error)
        return 0.5 if trust == "assumed" else 0.3
