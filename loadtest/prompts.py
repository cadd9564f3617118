"""Prompts: ordinary English made from a seed, so that caches and drafts see about what they see in use.

Random tokens would starve n-gram and MTP drafts; one text for all requests would be served from the prefix cache. Here
every prompt begins with its own case number (no shared prefix beyond the chat template), unless a shared prefix is
asked for, and goes on with sentences drawn from a pool of some thousands made by a small grammar.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from service.errors import UserError

_POOL = 3000

_WHO = """the night nurse|a retired surveyor|our supplier in Gdansk|the harbour master|the second auditor
a young cellist|the maintenance crew|her older brother|the museum's registrar|a visiting botanist|the council
the tenant upstairs
the translator|an engineer from the dam|the ferry company|my former teacher|the committee|a volunteer
the insurer|the village doctor|the stage manager|the data team|the baker's widow|a customs officer
the archivist""".replace("\n", "|")
_DID = """measured|rewrote|postponed|inspected|praised|sold|photographed|misread|catalogued|defended|repaired|moved
questioned|approved|remembered|compared|lost|described|delivered|replaced|tested|copied|refused|found|checked
""".strip().replace("\n", "|")
_WHAT = """the north bridge|a crate of glass lenses|the budget for spring|the oldest map in the room|three broken pumps
the signal from the buoy|a letter without a date|the recipe for rye bread|the cooling system|a set of temperature logs
the roof over the workshop|the draft agreement|an orchard near the river|the spare generator|the list of witnesses
a recording of the rehearsal|the water meter|the shipment of seed potatoes|the new timetable|a damaged violin
the patient's chart|the floor plan|an unpaid invoice|the weather report|the index of the second volume
""".strip().replace("\n", "|")
_WHERE = """behind the station|in the cold storage hall|at the edge of the marsh|on the upper deck|near the old mill
in a rented office|between the two towers|under the stairs|across the valley|in the reading room|by the east gate
at the laboratory in Lund|outside the courthouse|along the coast road|on the third floor""".replace("\n", "|")
_WHEN = """before the frost came|in the last week of March|while the others slept|after a long discussion
at half past six|during the strike|as soon as the tide turned|in spite of the rain|two days too late
for the first time in years
without telling anyone|when the power returned|in the dry summer of 1976|after the third attempt|on a Sunday
""".strip().replace("\n", "|")
_LINK = """Because of that,|Even so,|Later that day,|As a result,|To everyone's surprise,|In the meantime,|According to
the minutes,|Nobody noticed that|It was clear that|For this reason,|By contrast,|A week later,|In the end,|What is more,
""".strip().replace("\n", " ")
_WHY = """because the numbers did not agree|although the contract said otherwise|so that the work could go on
since nobody else had a key|which explained the noise|and this changed the plan|but the cost was never settled
unless the valve was closed first|and wrote down every step|which is why the door stayed open""".replace("\n", "|")
_TASKS = (
    "Write a detailed report on the events above: what happened, why, and what should be done next. Be thorough.",
    "Continue this account as a long story, in the same voice, with new events and with dialogue.",
    "Explain step by step how the people above could have avoided their problems, with examples.",
    "Summarise each event above in its own paragraph, then discuss at length how they are connected.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`messages` for the chat endpoint or `text` for completions; `max_tokens` None: the workload's own number."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None


class Writer:
    """Makes prompts of about `words` words; the same (seed, key) gives the same text in every process."""

    def __init__(self, seed: int, shared_words: int = 0) -> None:
        rng = random.Random(f"pool {seed}")
        lists = [text.split("|") for text in (_WHO, _DID, _WHAT, _WHERE, _WHEN, _LINK, _WHY)]
        self._pool = [_sentence(rng, *lists) for _ in range(_POOL)]
        self._seed = seed
        self._shared = _fill(rng, self._pool, shared_words)

    def prompt(self, key: str, words: int) -> str:
        """`words` includes the opening, a shared prefix and the task; never fewer than these need."""
        rng = random.Random(f"{self._seed} {key}")
        opening = [*self._shared, "Case", f"{rng.getrandbits(48):012x}:"]
        task = rng.choice(_TASKS).split()
        return " ".join([*opening, *_fill(rng, self._pool, words - len(opening) - len(task)), *task])


def _sentence(
    rng: random.Random, who: Any, did: Any, what: Any, where: Any, when: Any, link: Any, why: Any
) -> list[str]:
    parts = [rng.choice(who), rng.choice(did), rng.choice(what)]
    if rng.random() < 0.6:
        parts.append(rng.choice(where))
    if rng.random() < 0.6:
        parts.append(rng.choice(when))
    if rng.random() < 0.4:
        parts.append(rng.choice(why))
    text = " ".join(parts)
    text = f"{rng.choice(link)} {text}" if rng.random() < 0.35 else text[0].upper() + text[1:]
    return f"{text}.".split()


def _fill(rng: random.Random, pool: list[list[str]], words: int) -> list[str]:
    out: list[str] = []
    while len(out) < words:
        out += rng.choice(pool)
    return out[: max(words, 0)]


def load_dataset(path: Path) -> list[Prompt]:
    """One JSON object a line: `prompt` (text) or `messages` (OpenAI's), and optionally `max_tokens`."""
    prompts: list[Prompt] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"cannot read the dataset {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise UserError(f"{path}:{number} is not JSON: {error}") from error
        limit = raw.get("max_tokens", raw.get("output_tokens")) if isinstance(raw, dict) else None
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise UserError(f"{path}:{number}: max_tokens must be a positive whole number, got {limit!r}")
        if isinstance(raw, dict) and isinstance(raw.get("prompt"), str):
            prompts.append(Prompt(raw["prompt"], max_tokens=limit))
        elif isinstance(raw, dict) and isinstance(raw.get("messages"), list) and raw["messages"]:
            text = "\n".join(str(message.get("content", "")) for message in raw["messages"])
            prompts.append(Prompt(text, tuple(raw["messages"]), limit))
        else:
            raise UserError(f'{path}:{number} has neither "prompt" (text) nor "messages" (a list)')
    if not prompts:
        raise UserError(f"the dataset {path} is empty")
    return prompts
