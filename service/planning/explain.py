"""A live service's decode step, predicted beside measured, and the one setting that would help most. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from service.metrics.labels import CONCURRENCY
from service.metrics.top import Scrape
from service.planning import calibration as calibrations
from service.planning.plan import SAYS
from service.planning.settings import EngineSettings
from service.planning.step_model import StepModel, StepSplit

UNEXPLAINED = 0.25  # share of the measured step beyond which the model is not believed to name the culprit
LEAST_GAIN = 0.03


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of concurrency between two scrapes: measured tok/s while in it, the model's range over it, and the
    share of decoding time spent in it."""

    label: str
    low: int
    high: int
    share: float
    busy_s: float
    measured_tok_s: float
    predicted_low: float
    predicted_high: float


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of settings (or of load) and what the model says it would do to tok/s."""

    setting: str
    gain: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """`running`: requests decoding, the mean over busy time. `measured_s`: mean step; None where nothing decoded.
    `profile`: measured seconds a step by cause, from a profiler trace, where one was given."""

    pool: str
    running: int
    context_tokens: int
    predicted: StepSplit
    measured_s: float | None
    source: str
    buckets: tuple[Bucket, ...]
    advice: Advice | None
    profile: dict[str, float] | None = None
    note: str = ""

    @property
    def unexplained(self) -> float:
        """Seconds of the measured step that the model does not account for (negative: faster than predicted)."""
        return 0.0 if self.measured_s is None else self.measured_s - self.predicted.total

    @property
    def culprit(self) -> str:
        """A part of the split, or "unexplained" where the model is too far off to blame one of its parts."""
        if self.profile:
            return max(self.profile, key=self.profile.__getitem__)
        if self.measured_s and self.unexplained > UNEXPLAINED * self.measured_s:
            return "unexplained"
        return self.predicted.bottleneck

    @property
    def sentence(self) -> str:
        """One sentence: the culprit and the setting that would help most."""
        if self.measured_s is None:
            return "Nothing was decoded between the two readings: send load (glm5 load sweep) and ask again."
        step = f"{self.measured_s * 1e3:.1f} ms"
        users = "1 request" if self.running == 1 else f"{self.running} requests"
        if self.culprit == "unexplained":
            seen = f" ({self.note})" if self.note else ""
            then = "" if self.advice is None else f", then {self.advice.setting}"
            return (
                f"A step of {users} takes {step}, {self.unexplained * 1e3:.1f} ms more than this model and hardware "
                f"explain{seen}: the machine is shared, throttled or not the one described (glm5 preflight), or "
                f"prompts were being read; check that first{then}."
            )
        words = {"idle": "the GPU standing idle", "gemm": "matrix products", "attention": "attention"} | SAYS
        total, parts = self.predicted.total, self.predicted.parts
        if self.profile:
            total, parts = sum(self.profile.values()), self.profile
        cause = f"{words[self.culprit]} ({parts[self.culprit] / total:.0%} of the step)"
        if self.advice is None:
            return f"A step of {users} takes {step}, mostly {cause}; no setting that the model knows would help."
        return (
            f"A step of {users} takes {step}, mostly {cause}; what would help most is {self.advice.setting}: "
            f"{self.advice.gain:+.0%} tok/s predicted."
        )


def explain(
    model: StepModel,
    before: Scrape | None,
    now: Scrape,
    pool: str,
    profile: dict[str, float] | None = None,
    note: str = "",
) -> Explanation:
    """What happened between two scrapes (or since the start of the service, with `before` None) in one pool. `note`:
    something seen on the machine that may explain a difference."""
    buckets = _buckets(model, before, now, pool)
    busy = sum(b.busy_s for b in buckets)
    middle = sum(_mean_running(b) * b.busy_s for b in buckets)
    running = max(1, round(middle / busy)) if busy else max(1, round(now.sum("glm_requests_decoding", pool=pool)))
    context = _context(now, pool, running)
    step, source = _step(before, now, pool, buckets, model.settings.tokens_per_step)
    return Explanation(
        pool=pool,
        running=running,
        context_tokens=context,
        predicted=model.split(running, context),
        measured_s=step,
        source=source,
        buckets=buckets,
        advice=best_advice(model, running, context),
        profile=profile,
        note=note,
    )


def _delta(before: Scrape | None, now: Scrape, name: str, **labels: str) -> float:
    then = before.sum(name, **labels) if before else 0.0
    return max(0.0, now.sum(name, **labels) - then)


def bounds(label: str) -> tuple[int, int]:
    """Lowest and highest concurrency of a bucket label ("1", "3-4", "1025+")."""
    if label.endswith("+"):
        return int(label[:-1]), int(label[:-1]) * 2
    low, _, high = label.partition("-")
    return int(low), int(high or low)


def _buckets(model: StepModel, before: Scrape | None, now: Scrape, pool: str) -> tuple[Bucket, ...]:
    rows = []
    for label in CONCURRENCY:
        busy = _delta(before, now, "glm_busy_seconds_by_concurrency_total", pool=pool, concurrency=label)
        tokens = _delta(before, now, "glm_output_tokens_by_concurrency_total", pool=pool, concurrency=label)
        if busy > 0:
            rows.append((label, busy, tokens))
    total = sum(busy for _, busy, _ in rows)
    found = []
    for label, busy, tokens in rows:
        low, high = bounds(label)
        ends = [model.tokens_per_s(low), model.tokens_per_s(high)]
        found.append(Bucket(label, low, high, busy / total, busy, tokens / busy, min(ends), max(ends)))
    return tuple(found)


def _mean_running(bucket: Bucket) -> float:
    return (bucket.low + bucket.high) / 2


def _context(now: Scrape, pool: str, running: int) -> int:
    """Tokens of context held by `running` requests: prompt plus half of an answer each, from the mean request."""
    prompt = now.sum("glm_prompt_tokens_total", pool=pool)
    output = now.sum("glm_output_tokens_total", pool=pool)
    ended = now.sum("glm_requests_total", pool=pool)
    if not ended:  # all that was read and written so far is held by those that run
        return int(prompt + output)
    return int(running * (prompt + output / 2) / ended)


def _step(
    before: Scrape | None, now: Scrape, pool: str, buckets: Iterable[Bucket], per_step: float
) -> tuple[float | None, str]:
    """(mean seconds of a step, where that is from): the engine's own histogram, else tokens by concurrency."""
    count = _delta(before, now, "glm_decode_step_seconds_count", pool=pool)
    if count > 0:
        return _delta(before, now, "glm_decode_step_seconds_sum", pool=pool) / count, "the engine's step histogram"
    rows = [b for b in buckets if b.measured_tok_s > 0]
    busy = sum(b.busy_s for b in rows)
    if not busy:
        return None, "nothing decoded"
    seconds = sum(b.busy_s * _mean_running(b) * per_step / b.measured_tok_s for b in rows) / busy
    return seconds, "tokens and busy seconds by concurrency"


def best_advice(model: StepModel, running: int, context_tokens: int) -> Advice | None:
    """The one change with the greatest predicted gain at this load; None where nothing gains LEAST_GAIN."""
    now = _rate(model, running, context_tokens)
    options = [Advice(words, _rate(trial, running, context_tokens) / now - 1) for words, trial in _trials(model)]
    if model.settings.runtime == "llamacpp":
        more = 2 * running
        gain = _rate(model, more, 2 * context_tokens) / now - 1
        options.append(
            Advice(f"more requests at once ({more} instead of {running}; weights are read once for all)", gain)
        )
    best = max(options, key=lambda a: a.gain, default=None)
    return best if best and best.gain >= LEAST_GAIN else None


def _rate(model: StepModel, running: int, context_tokens: int) -> float:
    return running * model.settings.tokens_per_step_of(running) / model.decode_step_s(running, context_tokens)


def _trials(model: StepModel) -> Iterable[tuple[str, StepModel]]:
    """Every single change that the model can judge, in words."""
    s = model.settings

    def changed(settings: EngineSettings) -> StepModel:
        return replace(model, settings=settings, calibration=calibrations.choose(model.shape, model.box, settings))

    if s.runtime == "llamacpp":
        smaller = replace(model.shape, tensors=tuple(replace(t, type=_coarser(t.type)) for t in model.shape.tensors))
        if smaller.file_bytes < 0.9 * model.shape.file_bytes:
            yield "a file quantised to about 4 bits", replace(model, shape=smaller)
        return
    if not s.graphs:
        yield "CUDA graphs on", changed(replace(s, graphs=True))
    if s.kernels == "plugin":
        yield "this service's kernels instead of the plugin's", changed(replace(s, kernels="hybrid"))
    if s.tp > 1:
        for name, algorithm in model.box.link.algorithms.items():
            if name != s.allreduce and not (s.allreduce == "default" and algorithm.default):
                how = " ".join(f"{k}={v}" for k, v in algorithm.setting.items())
                yield f"all-reduce {name}" + (f" ({how})" if how else ""), changed(replace(s, allreduce=name))
    if s.kv_value_bytes > 1:
        yield "an fp8 KV cache", changed(replace(s, kv_value_bytes=1.0))
    if model.shape.mtp_layers:
        for k in {0, 1, 2, 3} - {s.draft_tokens}:
            yield (
                (f"{k} draft tokens (MTP)" if k else "no draft tokens"),
                changed(replace(s, draft_tokens=k, draft_schedule=())),
            )


def _coarser(kind: str) -> str:
    """The type of about 4 bits that a larger one could be quantised to."""
    return "Q4_0" if kind in ("F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K") else kind
