"""The gate as a whole, over a small model of hashes: a sound one passes, and each kind of wrong computing is named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from service.engines.vllm import canary
from service.engines.vllm.canary import Probe, Reference, Step, Tolerance
from service.engines.vllm.options import VllmOptions

VOCAB = 384
BF16 = canary.tolerance(VllmOptions(), on_cpu=False)
FP32 = canary.tolerance(VllmOptions(dtype="float32"), on_cpu=True)
Known = dict[int, SimpleNamespace]
Batch = list[list[int]]


def distribution(tokens: Sequence[int], shift: float = 0.0) -> Known:
    """The best TOP + 1 tokens after a text, which depend on all of it. `shift` moves all but the best one."""
    seed = hashlib.sha256(repr(list(tokens)).encode()).digest()
    names = list(dict.fromkeys(int.from_bytes(seed[i : i + 2]) % VOCAB for i in range(0, 32, 2)))[: canary.TOP + 1]
    return {
        token: SimpleNamespace(logprob=-0.4 - 0.5 * rank - seed[rank] / 5000 - (shift if rank else 0.0))
        for rank, token in enumerate(names)
    }


class HashLayer:
    """A model whose next token is a hash of the text before, with a prefix cache. `batched` says whose prompt each
    request of a batch is computed with; `decoded` and `together` shift what those ways of computing give, in
    log-probability."""

    vocab_size = VOCAB

    def __init__(
        self, *, batched: Callable[[Batch], Batch] = list, decoded: float = 0.0, together: float = 0.0
    ) -> None:
        self._batched, self._decoded, self._together = batched, decoded, together
        self._cache: dict[tuple[int, ...], Known] = {}

    async def generate(self, prompt: list[int], params: dict[str, Any], identity: str) -> Any:
        return self._answer(prompt, prompt, params, 0.0)

    async def generate_together(self, prompts: Batch, params: dict[str, Any], identity: str) -> list[Any]:
        mixed = self._batched(prompts)
        return [self._answer(p, m, params, self._together) for p, m in zip(prompts, mixed, strict=True)]

    def _answer(self, prompt: list[int], computed: list[int], params: dict[str, Any], shift: float) -> Any:
        tokens, steps = list(computed), []
        for number in range(params["max_tokens"]):
            known = distribution(tokens, shift + (self._decoded if number else 0.0))
            if not number and not params.get("skip_reading_prefix_cache"):
                known = self._cache.get(tuple(prompt), known)
            if not number:
                self._cache[tuple(prompt)] = known
            steps.append(known)
            tokens.append(max(known, key=lambda token: known[token].logprob))
        read = [None, *(distribution(prompt[:end]) for end in range(1, len(prompt)))]
        output = SimpleNamespace(token_ids=tokens[len(computed) :], logprobs=steps)
        return SimpleNamespace(outputs=[output], prompt_logprobs=read if "prompt_logprobs" in params else None)


async def faults(layer: Any, allowed: Tolerance = BF16, reference: Reference | None = None) -> tuple[str, ...]:
    return (await canary.judge(layer, reference, allowed)).faults


async def made_reference(layer: Any) -> Reference:
    return Reference("f", VOCAB, "a trusted setup", tuple(await canary.probe_all(layer)))


@pytest.mark.parametrize("allowed", [BF16, FP32])
async def test_a_sound_model_passes_with_its_reference_and_without(allowed: Tolerance) -> None:
    layer: Any = HashLayer()
    assert await canary.judge(layer, None, allowed) == canary.Verdict((), "gate: structure only (no reference)")
    verdict = await canary.judge(layer, await made_reference(layer), allowed)
    assert verdict.faults == ()
    assert verdict.note == "gate: 48 steps within 0 (mean) and 0 (worst) of the reference"


@pytest.mark.parametrize(
    "batched",
    [
        lambda batch: batch[1:] + batch[:1],
        lambda batch: batch[:-2] + batch[:-3:-1],
        lambda batch: [batch[0]] * len(batch),
        lambda batch: [batch[0][:1] + prompt[1:] for prompt in batch],
    ],
    ids=["each its neighbour's", "the last two changed over", "all the first one's", "one token of another"],
)
@pytest.mark.parametrize("allowed", [BF16, FP32])
async def test_a_batch_that_mixes_its_requests_is_caught(batched: Callable[[Batch], Batch], allowed: Tolerance) -> None:
    found = await faults(HashLayer(batched=batched), allowed)
    assert len(found) == 1
    assert found[0].startswith("a prompt alone and in a batch of 8 differ by")


async def test_the_batch_is_of_different_prompts_that_begin_apart() -> None:
    for vocab_size in (VOCAB, 32_000, 154_880):
        asked = canary.batch_prompts(vocab_size)
        assert len(asked) == canary.BATCH == len({prompt[0] for prompt in asked}) == len({len(p) for p in asked})
        assert all(0 <= token < vocab_size for prompt in asked for token in prompt)


async def test_decoding_that_differs_from_reading_is_caught() -> None:
    found = await faults(HashLayer(decoded=0.74))
    assert len(found) == 1
    assert "CUDA graphs or the KV cache are wrong" in found[0]


async def test_a_model_off_its_reference_is_caught() -> None:
    """A reference that another model's answers were written into."""
    layer = HashLayer()
    right = await made_reference(layer)
    other = tuple(
        Probe(p.prompt, tuple(Step(s.token, tuple((t, value - 0.74) for t, value in s.top)) for s in p.steps))
        for p in right.probes
    )
    found = await faults(layer, BF16, Reference(right.fingerprint, VOCAB, right.made_with, other))
    assert found == (
        "log-probabilities lie off the reference by 0.74 on average (allowed 0.3) and 0.74 at worst (allowed 1.5) over "
        "48 steps; made with a trusted setup",
    )


@pytest.mark.parametrize(
    ("allowed", "shift", "passes"),
    # bf16: rounding moves log-probabilities by up to some tenths; the least of the known faults moved them by 0.74.
    [(BF16, 0.2, True), (BF16, 0.74, False), (FP32, 1e-4, True), (FP32, 5e-3, False)],
)
async def test_the_tolerance_lies_between_rounding_and_the_known_faults(
    allowed: Tolerance, shift: float, passes: bool
) -> None:
    assert (await faults(HashLayer(together=shift), allowed) == ()) is passes
    assert (await faults(HashLayer(decoded=shift), allowed) == ()) is passes
