"""How many tokens to draft at which batch size: drafts pay while few requests run, and cost when many do. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import log

from service.planning.settings import Schedule
from service.planning.step_model import FITTED_TOKENS, StepModel

LENGTHS = (0, 1, 2, 3)
WORTH = 0.02  # a longer draft must gain as much
OVERRATED = 1.3  # docs/planning.md: with drafts and 256 tokens a step the model was 22 and 39 % too high


def careful_rate(model: StepModel, concurrency: int, context: float) -> float:
    """tokens_per_s for choosing settings: drafts beyond the fitted batches are believed less."""
    rate = model.tokens_per_s(concurrency, context)
    running = min(concurrency, model.settings.slots)
    drafts = model.settings.drafts(running)
    return rate / OVERRATED if drafts and running * (1 + drafts) > FITTED_TOKENS else rate


def schedule(model: StepModel, context: int) -> Schedule:
    """(first, last, tokens) ranges of batch size from 1 to the slots, as vLLM takes them. Lengths are chosen per octave
    of batch sizes and never grow with the batch; among those the sequence with the greatest product of mean rates.
    `context`: tokens that each request holds. Empty without an MTP layer."""
    if not model.shape.mtp_layers:
        return ()
    octaves = _octaves(model.settings.slots)
    trials = {k: replace(model, settings=replace(model.settings, draft_tokens=k, draft_schedule=())) for k in LENGTHS}
    # log of the mean rate, less what a longer draft must gain
    value = [
        {
            k: log(sum(careful_rate(trial, b, context) for b in {first, (first + last) // 2, last})) - WORTH * k
            for k, trial in trials.items()
        }
        for first, last in octaves
    ]
    lengths = max(_falling(len(octaves), LENGTHS[-1]), key=lambda ks: sum(v[k] for v, k in zip(value, ks, strict=True)))
    ranges: list[tuple[int, int, int]] = []
    for (first, last), length in zip(octaves, lengths, strict=True):
        if ranges and ranges[-1][2] == length:
            ranges[-1] = (ranges[-1][0], last, length)
        else:
            ranges.append((first, last, length))
    return tuple(ranges)


def _octaves(slots: int) -> list[tuple[int, int]]:
    """(1, 1), (2, 2), (3, 4), (5, 8), ... up to `slots`."""
    found, first, last = [], 1, 1
    while first <= slots:
        found.append((first, min(last, slots)))
        first, last = last + 1, last * 2
    return found


def _falling(count: int, most: int) -> list[tuple[int, ...]]:
    """Every sequence of `count` lengths from 0 to `most` that never grows (some hundreds at most)."""
    if count == 0:
        return [()]
    return [(k, *rest) for k in range(most + 1) for rest in _falling(count - 1, k)]
