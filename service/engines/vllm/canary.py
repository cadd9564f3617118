"""The gate before ready: a model that loaded wrongly is fluent, or at least prompt; its answers give it away.

With a reference (made once on a trusted setup): the same prompts must give the same log-probabilities. Without one, the
structure is looked at: known kinds of garbage repeat one token, know nothing (a flat distribution), or know everything
(one token at probability 1), name tokens that do not exist, change with the batch that a prompt is computed in, or
differ between decoding step by step (CUDA graphs, KV cache) and reading the same text at once (neither).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import UserError
from service.gguf.header import GgufHeader

if TYPE_CHECKING:
    from service.engines.vllm.layer import Layer
    from service.engines.vllm.options import VllmOptions

STEPS = 16
TOP = 8
BATCH = 8
FORMAT = 1
_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token: its id and the log-probabilities of the best TOP tokens, best first."""

    token: int
    top: tuple[tuple[int, float], ...]

    @property
    def known(self) -> dict[int, float]:
        return dict(self.top)


@dataclass(frozen=True, slots=True)
class Probe:
    """A fixed prompt and the greedy answer to it."""

    prompt: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Answers of a trusted setup for one file. `fingerprint` is the file's (see `fingerprint`)."""

    fingerprint: str
    vocab_size: int
    made_with: str
    probes: tuple[Probe, ...]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str, where: str) -> Reference:
        """Raises UserError for what is no reference."""
        try:
            tree = json.loads(text)
            if tree["format"] != FORMAT:
                raise ValueError(f"format {tree['format']}, this version reads {FORMAT}")
            probes = tuple(
                Probe(
                    tuple(map(int, probe["prompt"])),
                    tuple(
                        Step(int(step["token"]), tuple((int(t), float(p)) for t, p in step["top"]))
                        for step in probe["steps"]
                    ),
                )
                for probe in tree["probes"]
            )
            return Reference(str(tree["fingerprint"]), int(tree["vocab_size"]), str(tree["made_with"]), probes)
        except (ValueError, KeyError, TypeError) as fault:
            raise UserError(f"{where} is not a reference of glm5 check --make-reference: {fault}") from None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`faults`: why the model may not serve (empty: it may). `note`: what was compared, for the log."""

    faults: tuple[str, ...]
    note: str


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far log-probabilities of the reference's best tokens may lie off, on average and at worst. bf16 against fp32
    over quantised weights moves them by up to a few tenths; known faults moved them by 0.74 to 0.78 on average, where
    0.3 is allowed (docs/gpu-validation.md)."""

    mean: float
    worst: float


def prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """Fixed token ids, by no tokenizer: a ramp, a repetition and a spread. All ids exist in any vocabulary used."""
    return [tuple(range(33, 33 + 24)), (72, 101, 108, 108, 111) * 4, spread(vocab_size, 48)]


def batch_prompts(vocab_size: int) -> list[tuple[int, ...]]:
    """BATCH prompts that begin apart, of 20 to 48 tokens: an answer that went to another prompt shows."""
    return [spread(vocab_size, 20 + 4 * index, start=BATCH - index) for index in range(BATCH)]


def spread(vocab_size: int, length: int, start: int = 1) -> tuple[int, ...]:
    """`length` ids far apart; another `start`, another first one. All exist in any vocabulary used."""
    span = max(2, min(vocab_size, 50_000) - 1)
    return tuple(1 + (index * 7919 + start * 104_729) % (span - 1) for index in range(length))


def fingerprint(header: GgufHeader) -> str:
    """SHA-256 (hex) over the header's identity and samples of the tensor data: cheap at 400 GB, and different for two
    quantisations or fine-tunes of one model, whose headers may be equal."""
    digest = hashlib.sha256(header.identity.encode())
    tensors = list(header.tensors.values())
    stride = max(1, len(tensors) // _SAMPLES)
    for path_index, path in enumerate(header.files):
        with path.open("rb") as stream:
            for tensor in tensors[::stride]:
                if tensor.file == path_index:
                    stream.seek(tensor.offset + tensor.bytes // 2)
                    digest.update(stream.read(min(_SAMPLE_BYTES, tensor.bytes - tensor.bytes // 2)))
    return digest.hexdigest()


def structural_faults(probes: Sequence[Probe], vocab_size: int) -> list[str]:
    """What can be said without a reference."""
    faults: list[str] = []
    tokens = [step.token for probe in probes for step in probe.steps]
    outside = sorted({t for t in tokens if not 0 <= t < vocab_size})
    if outside:
        faults.append(f"token {outside[0]} is not in the vocabulary of {vocab_size}")
    if any(not math.isfinite(p) for probe in probes for step in probe.steps for _, p in step.top):
        faults.append("log-probabilities are not numbers")
        return faults
    if len(set(tokens)) == 1 and len(tokens) > 1:
        faults.append(f"every answer to every prompt is token {tokens[0]} again and again")
    first = [step.top for probe in probes for step in probe.steps]
    spread = [top[0][1] - top[-1][1] for top in first if len(top) > 1]
    if spread and max(spread) < 1e-3:
        faults.append("all tokens are equally likely, whatever the prompt: the output carries no information")
    heads = {tuple(t for t, _ in probe.steps[0].top) for probe in probes if probe.steps}
    exact = {tuple(round(p, 4) for _, p in probe.steps[0].top) for probe in probes if probe.steps}
    if len(probes) > 1 and len(heads) == 1 and len(exact) == 1:
        faults.append("the first token's distribution is the same for every prompt: the prompt is not looked at")
    if first and all(top[0][1] > -1e-6 for top in first):
        faults.append("every token has probability 1: the distribution has collapsed")
    return faults


def differences(reference: Sequence[Probe], answers: Sequence[Probe]) -> tuple[float, float, int]:
    """(mean, worst) distance of log-probabilities at steps with equal tokens before, over tokens that both name; and
    the number of steps compared. A step whose token differs is the last of its probe that is compared."""
    gaps: list[float] = []
    steps = 0
    for wanted, found in zip(reference, answers, strict=True):
        for right, here in zip(wanted.steps, found.steps, strict=False):
            steps += 1
            known = here.known
            floor = min(known.values(), default=0.0)
            # A token that fell out of the list is at most as likely as the last one on it.
            gaps += [abs(p - known[t]) if t in known else max(0.0, p - floor) for t, p in right.top[:4]]
            if right.token not in known:
                # The best token is not even among the best few: it fell by what lies between those, at least.
                gaps.append(right.top[0][1] - right.top[-1][1])
            if right.token != here.token:
                break
    if not gaps:
        return math.inf, math.inf, 0
    return sum(gaps) / len(gaps), max(gaps), steps


def compare(reference: Reference, answers: Sequence[Probe], tolerance: Tolerance) -> list[str]:
    """Faults against a reference."""
    if [p.prompt for p in reference.probes] != [p.prompt for p in answers]:
        return ["the reference was made with other prompts"]
    mean, worst, steps = differences(reference.probes, answers)
    if mean > tolerance.mean or worst > tolerance.worst:
        return [
            f"log-probabilities lie off the reference by {mean:.3g} on average (allowed {tolerance.mean:g}) and "
            f"{worst:.3g} at worst (allowed {tolerance.worst:g}) over {steps} steps; made with {reference.made_with}"
        ]
    return []


def batch_faults(alone: Sequence[Probe], together: Sequence[Probe], allowed: Tolerance) -> list[str]:
    """The first token's distribution after a prompt must not depend on what else is in the batch. `alone` and
    `together` hold the same prompts in the same order."""
    gaps = [differences([_first(one)], [_first(other)])[:2] for one, other in zip(alone, together, strict=True)]
    mean, worst = max(mean for mean, _ in gaps), max(worst for _, worst in gaps)
    if mean > allowed.mean or worst > allowed.worst:
        return [
            f"a prompt alone and in a batch of {len(together)} differ by {mean:.3g} on average, {worst:.3g} at worst"
        ]
    return []


def _first(probe: Probe) -> Probe:
    return Probe(probe.prompt, probe.steps[:1])


def replay_faults(decoded: Probe, read: Probe, allowed: Tolerance) -> list[str]:
    """The answer decoded step by step must have the probabilities that it has when it is read at once."""
    mean, worst, steps = differences([decoded], [read])
    if mean > allowed.mean or worst > allowed.worst:
        return [
            f"decoding and reading the same {steps} tokens differ by {mean:.3g} on average, {worst:.3g} at worst: "
            "CUDA graphs or the KV cache are wrong"
        ]
    return []


async def ask(layer: Layer, prompt: tuple[int, ...], steps: int, identity: str) -> Probe:
    """The engine's greedy answer, computed anew."""
    return _probe(prompt, await layer.generate(list(prompt), _greedy(steps), identity))


async def ask_together(layer: Layer, asked: Sequence[tuple[int, ...]], steps: int, identity: str) -> list[Probe]:
    """The engine's greedy answers to prompts that it computes in one batch, in the order of the prompts."""
    results = await layer.generate_together([list(prompt) for prompt in asked], _greedy(steps), identity)
    return [_probe(prompt, result) for prompt, result in zip(asked, results, strict=True)]


def _greedy(steps: int) -> dict[str, Any]:
    # What one answer left in the prefix cache must not stand in for the next one's own computing.
    return {
        "temperature": 0.0,
        "max_tokens": steps,
        "ignore_eos": True,
        "logprobs": TOP,
        "skip_reading_prefix_cache": True,
    }


def _probe(prompt: tuple[int, ...], result: Any) -> Probe:
    output = result.outputs[0]
    found = []
    for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
        best = sorted(((int(t), float(entry.logprob)) for t, entry in known.items()), key=lambda pair: -pair[1])
        found.append(Step(int(token), tuple(best[:TOP])))
    return Probe(prompt, tuple(found))


async def reread(layer: Layer, probe: Probe, identity: str) -> Probe:
    """The same tokens, given as a prompt: their probabilities without decoding. Each step keeps its token."""
    whole = [*probe.prompt, *(step.token for step in probe.steps)]
    params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": TOP}
    result = await layer.generate(whole, params, identity)
    steps = []
    for step, known in zip(probe.steps, result.prompt_logprobs[len(probe.prompt) :], strict=True):
        best = sorted(((int(t), float(entry.logprob)) for t, entry in known.items()), key=lambda pair: -pair[1])
        steps.append(Step(step.token, tuple(best[: TOP + 1])))
    return Probe(probe.prompt, tuple(steps))


async def probe_all(layer: Layer) -> list[Probe]:
    return [await ask(layer, p, STEPS, f"gate-{i}") for i, p in enumerate(prompts(layer.vocab_size))]


def tolerance(options: VllmOptions, *, on_cpu: bool) -> Tolerance:
    if options.dtype == "float32" and on_cpu:
        return Tolerance(1e-3, 1e-2)
    return Tolerance(0.3, 1.5)


def read_reference(options: VllmOptions, header: GgufHeader | None) -> Reference | None:
    """The reference that the settings name. Raises UserError when it is not there, none at all, or another file's."""
    if not options.reference:
        return None
    path = Path(options.reference).expanduser()
    if not path.is_file():
        raise UserError(f"reference {path} does not exist; make it with glm5 check --make-reference")
    reference = Reference.from_json(path.read_text(encoding="utf-8"), str(path))
    if header is not None and reference.fingerprint != fingerprint(header):
        raise UserError(f"reference {path} was made for another file than {header.path}")
    return reference


async def judge(layer: Layer, reference: Reference | None, allowed: Tolerance) -> Verdict:
    """All that can be judged here."""
    answers = await probe_all(layer)
    faults = structural_faults(answers, layer.vocab_size)
    if not faults:
        last, asked = answers[-1], batch_prompts(layer.vocab_size)
        alone = [await ask(layer, prompt, 1, f"gate-alone-{i}") for i, prompt in enumerate(asked)]
        faults += batch_faults(alone, await ask_together(layer, asked, 1, "gate-batch"), allowed)
        faults += replay_faults(last, await reread(layer, last, "gate-reread"), allowed)
    if reference is None:
        return Verdict(tuple(faults), "gate: structure only (no reference)")
    faults += compare(reference, answers, allowed)
    mean, worst, steps = differences(reference.probes, answers)
    note = f"gate: {steps} steps within {mean:.2g} (mean) and {worst:.2g} (worst) of the reference"
    return Verdict(tuple(faults), note)


async def make_reference(layer: Layer, header: GgufHeader, made_with: str) -> Reference:
    """Ask the loaded model. Raises UserError when its answers fail the structural checks."""
    answers = await probe_all(layer)
    faults = structural_faults(answers, layer.vocab_size)
    if faults:
        raise UserError("no reference made, the answers are garbage: " + "; ".join(faults))
    return Reference(fingerprint(header), layer.vocab_size, made_with, tuple(answers))
