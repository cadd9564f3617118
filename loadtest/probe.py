"""Before a sweep: find the model, learn what the server accepts, and calibrate prompt length by its own counts."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import orjson

from loadtest.answer import Answer
from loadtest.plan import Workload
from loadtest.prompts import Prompt, Writer
from loadtest.records import Record
from loadtest.wire import Meter, Target, connect
from service.errors import UserError

_OPTIONAL = {"ignore_eos": ", so answers may end early", "continuous_usage_stats": ""}
_SHORT, _LONG = 40, 160  # words of the two calibrating prompts


@dataclass(frozen=True, slots=True)
class Probe:
    """`workload` as the server will take it; `e2el_s` of one whole request alone; remarks for the report."""

    workload: Workload
    e2el_s: float
    tokens_per_event: float
    notes: tuple[str, ...] = ()


def get_json(target: Target, path: str, timeout_s: float = 10.0) -> Any:
    """Raises OSError (also for HTTP errors) or ValueError."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    with urllib.request.urlopen(urllib.request.Request(target.url + path, headers=headers), timeout=timeout_s) as reply:
        return orjson.loads(reply.read())


def find_model(target: Target) -> str:
    """The one model of the server. Raises UserError when there are none or several."""
    try:
        names = [str(model["id"]) for model in get_json(target, "/v1/models")["data"]]
    except urllib.error.HTTPError as error:
        raise UserError(f"{target.url}/v1/models answers {error.code}; name the model with --model") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no OpenAI server at {target.url}: {getattr(error, 'reason', error)}") from error
    if len(names) != 1:
        raise UserError(f"{target.url} serves {len(names)} models ({', '.join(names)}); choose one with --model")
    return names[0]


def probe(target: Target, workload: Workload, timeout_s: float) -> Probe:
    """Raises UserError when no measurable answer can be had."""
    return asyncio.run(_probe(target, workload, timeout_s))


async def _probe(target: Target, workload: Workload, timeout_s: float) -> Probe:
    notes: list[str] = []
    record = await _ask(target, workload, _text(workload, _SHORT, "a"), 1, timeout_s)
    for field in _OPTIONAL:
        without = replace(
            workload,
            ignore_eos=workload.ignore_eos and field != "ignore_eos",
            chunk_usage=workload.chunk_usage and field != "continuous_usage_stats",
        )
        if record.status in (400, 422) and field in record.detail and without != workload:
            workload = without
            notes.append(f"the server refuses {field}: it is left out" + _OPTIONAL[field])
            record = await _ask(target, workload, _text(workload, _SHORT, "a"), 1, timeout_s)
    _require(target, record)
    if not workload.dataset:
        longer = await _ask(target, workload, _text(workload, _LONG, "b"), 1, timeout_s)
        _require(target, longer)
        per_word = (longer.prompt_tokens - record.prompt_tokens) / (_LONG - _SHORT)
        if not 0.2 < per_word < 20:
            raise UserError(
                f"{target.url} counts {record.prompt_tokens} prompt tokens for {_SHORT} words and "
                f"{longer.prompt_tokens} for {_LONG}: its usage cannot be trusted"
            )
        words = round(_SHORT + (workload.input_tokens - record.prompt_tokens) / per_word)
        shared = round(workload.shared_tokens / per_word)
        floor = 30 + shared
        if words < floor:
            least = round(record.prompt_tokens + (floor - _SHORT) * per_word)
            notes.append(f"input of {workload.input_tokens} tokens is below the least possible, {least}")
        workload = replace(workload, words=max(words, floor), shared_words=shared)
    prompt = workload.dataset[0] if workload.dataset else _text(workload, workload.words, "c")
    meter = Meter()
    whole = await _ask(target, workload, prompt, prompt.max_tokens or workload.output_tokens, timeout_s, meter)
    _require(target, whole)
    return Probe(workload, whole.e2el, whole.output_tokens / max(meter.events, 1), tuple(notes))


def _text(workload: Workload, words: int, key: str) -> Prompt:
    return Prompt(Writer(workload.seed, workload.shared_words).prompt(f"probe {key}", words))


def _require(target: Target, record: Record) -> None:
    # One token may be no text: a space that is trimmed, the first bytes of a character.
    answered = record.ok or (record.error == "empty" and record.asked_tokens == 1)
    if record.error == "no_usage" or (answered and not record.prompt_tokens):
        raise UserError(
            f"{target.url} sends no usage with streams (stream_options.include_usage): "
            "without the server's own token counts nothing is measured"
        )
    if not answered:
        what = f"http {record.status}" if record.error == "http" else record.error
        raise UserError(f"{target.url} does not answer the first request: {what} {record.detail}")


async def _ask(
    target: Target, workload: Workload, prompt: Prompt, tokens: int, timeout_s: float, meter: Meter | None = None
) -> Record:
    body = workload.body(prompt) | {"max_tokens": tokens}
    record = Record(0, 0, True, perf_counter(), perf_counter(), asked_tokens=tokens)
    answer = Answer(record)
    try:
        connection = await connect(target, meter or Meter(), timeout_s)
    except (OSError, TimeoutError) as error:
        raise UserError(f"no connection to {target.url}: {error or 'timed out'}") from error
    await connection.exchange(target.post(workload.path, orjson.dumps(body)), answer, timeout_s)
    connection.abort()
    return record
