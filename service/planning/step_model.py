"""The model of one decode step: seconds, split by cause, from a model's tensors, a box and the engine's settings.

    model = step_model("glm-5", "8x-rtx-pro-6000", slots=64)
    model.decode_step_s(running=8, context_tokens=8 * 2000)    # seconds
    model.prefill_s(tokens=1500)

A step of M running requests computes M * (1 + draft tokens) tokens on every rank, one after the other: read weights,
read KV, two all-reduces a layer and one for the embedding, gaps between kernels, draft passes, and host time. Parts
are added, as they run one after the other on one stream; without CUDA graphs the host's launches hide behind the GPU
or the GPU waits for them, whichever is slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from service.errors import UserError
from service.planning import calibration as calibrations
from service.planning.hardware import Box, Trust
from service.planning.hardware import box as find_box
from service.planning.kernels import Kernels, kernels
from service.planning.settings import Calibration, EngineSettings
from service.planning.shape import ModelShape
from service.planning.sources import model_shape

ACTIVATION_BYTES = 2  # bf16 messages
MTP_DRAFTS = 3  # what the published MTP figures used
FITTED_TOKENS, EXTRAPOLATED_ERROR = (
    128,
    0.4,
)  # docs/planning.md: the two rows with 256 tokens a step are 22 and 39 % off


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of one step by cause. `weights` is the time at full readable bandwidth, `kernels` what the kernels take
    beyond that, `launch` gaps between them or waiting for the host."""

    weights: float
    kernels: float
    kv: float
    allreduce: float
    launch: float
    draft: float
    host: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def bottleneck(self) -> str:
        parts = self.parts
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class StepModel:
    """Predicts steps. Immutable; steps are cached, so a call costs about a microsecond."""

    shape: ModelShape
    box: Box
    settings: EngineSettings
    calibration: Calibration = field(default_factory=Calibration)
    _cache: dict[int, tuple[StepSplit, float]] = field(init=False, default_factory=dict, compare=False, repr=False)
    _prompts: dict[int, float] = field(init=False, default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.settings.tp > self.box.gpus:
            raise UserError(f"TP={self.settings.tp} needs {self.settings.tp} GPUs; {self.box.name} has {self.box.gpus}")

    @cached_property
    def _kernels(self) -> Kernels:
        read = sum(self.shape.read_bytes(1, 1, self.settings.attention, self.settings.runtime).values())
        return kernels(self.settings.kernels, self.box.gpu, self.calibration, 2 * self.shape.active_parameters / read)

    def decode_step_s(self, running: int, context_tokens: int) -> float:
        """Seconds of a step with `running` requests that hold `context_tokens` tokens of context together."""
        if running < 1:
            return 0.0
        return self._base(running)[1] + self._kv_s(running, context_tokens)

    def split(self, running: int, context_tokens: int = 0) -> StepSplit:
        """The same step by cause; `split(...).total == decode_step_s(...)`."""
        if running < 1:
            return StepSplit(0, 0, 0, 0, 0, 0, 0)
        return replace(self._base(running)[0], kv=self._kv_s(running, context_tokens))

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute a prompt of `tokens` tokens alone, in chunks of settings.prefill_chunk."""
        if tokens <= 0:
            return 0.0
        chunk = self.settings.prefill_chunk
        whole, rest = divmod(tokens, chunk)
        seconds = whole * self._prompt_step(chunk) + (self._prompt_step(rest) if rest else 0.0)
        # causal attention: 2 flops for each of (key + value) values of each pair, at a tenth of the tensor peak
        pairs = tokens * tokens / 2
        attention = 2 * self.shape.attention_width * pairs * self.shape.layers / self.settings.tp
        return seconds + attention / (self.box.gpu.flops * (1.0 if self.box.gpu.is_cpu else 0.1))

    def tokens_per_s(self, concurrency: int, context: float = 0.0) -> float:
        """Aggregate output tokens per second of `concurrency` users with `context` tokens each, decode only.
        Beyond settings.slots users wait, so the rate stays that of full slots."""
        running = min(concurrency, self.settings.slots)
        step = self.decode_step_s(running, int(running * context))
        return running * self.settings.tokens_per_step_of(running) / step if step else 0.0

    @property
    def clock(self) -> TokenClock:
        """For engines that emit one token a step: speculative decoding folded into a shorter step."""
        return TokenClock(self)

    @property
    def trust(self) -> Trust:
        return self.box.trust

    @property
    def band(self) -> float:
        """Relative half-width of the error band of tokens_per_s."""
        return self.calibration.band(self.trust)

    def band_at(self, running: int) -> float:
        """The band at a batch size: wider where drafts make batches that no published row was fitted at."""
        drafts = self.settings.drafts(running)
        outside = drafts and running * (1 + drafts) > FITTED_TOKENS
        return max(self.band, EXTRAPOLATED_ERROR) if outside else self.band

    def read_bytes(self, tokens: float) -> float:
        """Bytes of weights that one GPU reads in a step of `tokens` tokens."""
        return sum(self.shape.read_bytes(tokens, *self._how).values())

    @property
    def allreduces(self) -> int:
        """All-reduces of a step without drafts: after attention and after the MLP of each layer, and the embedding."""
        return 0 if self.settings.tp == 1 else 2 * self.shape.layers + 1

    def allreduce_s(self, tokens: float) -> float:
        """Seconds of one all-reduce of `tokens` hidden states."""
        if self.settings.tp == 1:
            return 0.0
        message = max(1.0, tokens) * self.shape.hidden * ACTIVATION_BYTES
        return self.box.link.pick(self.settings.allreduce, message).seconds(message) * self.calibration.allreduce_scale

    # -- parts

    @property
    def _how(self) -> tuple[int, Any, Any]:
        return self.settings.tp, self.settings.attention, self.settings.runtime

    def _base(self, running: int) -> tuple[StepSplit, float]:
        """The split without KV reads, and its sum."""
        found = self._cache.get(running)
        if found is None:
            split = self._compute(running)
            found = self._cache[running] = (split, split.total)
        return found

    def _compute(self, running: int) -> StepSplit:
        s, c = self.settings, self.calibration
        tokens, graph = s.padded(running * (1 + s.drafts(running)))
        weights, excess = self._weights(tokens)
        allreduce = self.allreduces * self.allreduce_s(tokens)
        gaps = self.shape.layers * (c.launches_per_layer * c.graph_gap_s + c.layer_overhead_s)
        if s.runtime == "llamacpp":
            gaps = 0.0
        launch = gaps
        if not graph and s.runtime != "llamacpp":
            busy = weights + excess + allreduce + gaps
            launch = gaps + max(0.0, self.shape.layers * c.eager_layer_s - busy)
        host = c.host_step_s + c.host_request_s * running
        return StepSplit(weights, excess, 0.0, allreduce, launch, self._draft_s(running), host)

    def _weights(self, tokens: float) -> tuple[float, float]:
        """(seconds at readable bandwidth, seconds beyond)."""
        floor = total = 0.0
        for kind, read in self.shape.read_bytes(tokens, *self._how).items():
            floor += read / self.box.gpu.readable
            total += self._kernels.seconds(kind, read, tokens)
        floor = min(floor, total)
        return floor, total - floor

    def _kv_s(self, running: int, context_tokens: float) -> float:
        s = self.settings
        if s.attention == "dense":
            return context_tokens * self._dense_kv_s
        read = self.shape.kv_read_bytes(running, context_tokens, s.tp, s.kv_value_bytes, s.attention)
        return read / self._kv_rate

    @cached_property
    def _kv_rate(self) -> float:
        return self.box.gpu.bandwidth * self.calibration.kv_efficiency

    @cached_property
    def _dense_kv_s(self) -> float:
        """Seconds a step for each token of context."""
        return self.shape.kv_read_bytes(1, 1.0, self.settings.tp, self.settings.kv_value_bytes) / self._kv_rate

    def _draft_s(self, running: int) -> float:
        """k passes of the MTP layer, one token a request each, and the head each time."""
        s, c = self.settings, self.calibration
        drafts = s.drafts(running)
        if not drafts:
            return 0.0
        if not self.shape.mtp_layers:
            raise UserError(f"{self.shape.name} has no MTP layer: draft tokens must be 0")
        seconds = 0.0
        for row in self.shape.draft_roles(*self._how):
            if row.role.read != "rows":
                read = row.read(running, self.shape.top_k, self.shape.experts)
                seconds += self._kernels.seconds(row.role.kind, read, running)
        head = self.shape.read_bytes(running, *self._how).get("lm_head", 0.0)
        seconds += self._kernels.seconds("lm_head", head, running)
        seconds += (3 * self.allreduce_s(running)) if s.tp > 1 else 0.0
        seconds += self.shape.mtp_layers * (c.launches_per_layer * c.graph_gap_s + c.layer_overhead_s)
        return drafts * seconds

    def _prompt_step(self, tokens: int) -> float:
        found = self._prompts.get(tokens)
        if found is None:
            found = self._prompts[tokens] = self._compute_prompt(tokens)
        return found

    def _compute_prompt(self, tokens: int) -> float:
        weights, excess = self._weights(tokens)
        compute = 2 * self.shape.active_parameters * tokens / self.settings.tp / self.box.gpu.flops
        gaps = 0.0 if self.settings.runtime == "llamacpp" else self.shape.layers * self.calibration.eager_layer_s
        busy = max(weights + excess, compute) + self.allreduces * self.allreduce_s(tokens)
        return max(busy, gaps) + self.calibration.host_step_s


@dataclass(frozen=True, slots=True)
class TokenClock:
    """Seconds per output token of each running request; equal to the step where nothing is drafted."""

    model: StepModel

    def decode_step_s(self, running: int, context_tokens: int) -> float:
        return self.model.decode_step_s(running, context_tokens) / self.model.settings.tokens_per_step_of(running)

    def prefill_s(self, tokens: int) -> float:
        return self.model.prefill_s(tokens)


@lru_cache(maxsize=64)
def step_model(
    model: str | ModelShape = "glm-5",
    hardware: str = "8x-rtx-pro-6000",
    *,
    mtp: bool | None = None,
    cuda_graphs: bool | None = None,
    **settings: Any,
) -> StepModel:
    """A StepModel by names. `model`: a built-in shape ("glm-5") or a GGUF path; `hardware`: a box of the catalogue or a
    preflight JSON; `settings`: fields of EngineSettings (tp, slots, graphs, kernels, draft_tokens, ...), `mtp` and
    `cuda_graphs` as profiles write them. Equal arguments give the same object. Raises UserError."""
    if mtp is not None:
        settings["draft_tokens"] = MTP_DRAFTS if mtp else 0
    if cuda_graphs is not None:
        settings["graphs"] = cuda_graphs
    shape = model if isinstance(model, ModelShape) else model_shape(model)
    where = find_box(hardware)
    known = {f.name for f in fields(EngineSettings)}
    unknown = set(settings) - known
    if unknown:
        raise UserError(f"unknown engine setting {sorted(unknown)[0]!r}; known: {', '.join(sorted(known))}")
    base: dict[str, Any] = {"tp": where.gpus}
    if where.gpu.is_cpu:
        base |= {"runtime": "llamacpp", "kernels": "llamacpp", "graphs": False}
    chosen = EngineSettings(**(base | settings))
    return StepModel(shape, where, chosen, calibrations.choose(shape, where, chosen))
