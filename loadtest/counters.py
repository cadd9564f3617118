"""The server's own token counters, as the second opinion on what the client counted."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

TOLERANCE = 0.005
"""Client and server must agree within this share of the server's count."""

_SETTLE_S = 5.0  # engines and replicas publish counters a step or a report late
_STILL_S = 1.0  # a counter that has not moved for so long has taken in what came before

DIALECTS = {
    "glm5-serve": ("glm_output_tokens_total", "glm_prompt_tokens_total"),
    "vllm": ("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
    "llama.cpp": ("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
}

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment, summed over labels (replicas, models, tiers)."""

    dialect: str
    output_tokens: float
    prompt_tokens: float


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """`status`: agree, disagree, or unavailable (the server has no counters that we know). Counts are differences."""

    status: str
    dialect: str = ""
    client_tokens: int = 0
    server_tokens: int = 0
    detail: str = ""

    @property
    def off_by(self) -> float:
        """Share by which the client's count differs from the server's."""
        if self.server_tokens == self.client_tokens:
            return 0.0
        return (self.client_tokens - self.server_tokens) / max(self.server_tokens, 1)


def parse(text: str) -> Reading | None:
    """Sum the known counters of a Prometheus page; None where none is known. Ray adds its own prefix: `ray_`."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        name = name.removeprefix("ray_")
        try:
            sums[name] = sums.get(name, 0.0) + float(value)
        except ValueError:
            continue
    for dialect, (output, prompt) in DIALECTS.items():
        if output in sums:
            return Reading(dialect, sums[output], sums.get(prompt, 0.0))
    return None


def read(url: str, api_key: str = "") -> Reading | str:
    """The counters at `url`, or one sentence on why there are none."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            text = reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
    return parse(text) or f"{url} has no token counter of {', '.join(DIALECTS)}"


def still(url: str, api_key: str = "", wait_s: float = _SETTLE_S) -> Reading | str:
    """A reading that has not changed for a second, so that earlier requests are in it; the last one after `wait_s`."""
    begin = since = time.monotonic()
    last = read(url, api_key)
    while not isinstance(last, str) and (now := time.monotonic()) - since < _STILL_S and now - begin < wait_s:
        time.sleep(0.2)
        again = read(url, api_key)
        if again != last:
            last, since = again, time.monotonic()
    return last


def judge(before: Reading | str, after: Reading | str, client_tokens: int) -> CrossCheck:
    """Compare what the client received between two readings with what the server says it made. Pure."""
    if isinstance(before, str) or isinstance(after, str):
        why = before if isinstance(before, str) else str(after)
        return CrossCheck("unavailable", client_tokens=client_tokens, detail=why)
    made = round(after.output_tokens - before.output_tokens)
    if made < 0:
        return CrossCheck("disagree", after.dialect, client_tokens, made, "the counter went back: the server restarted")
    check = CrossCheck("agree", after.dialect, client_tokens, made)
    if abs(client_tokens - made) <= TOLERANCE * max(made, 1):
        return check
    if made > client_tokens:
        why = "the server made more: other clients, or answers cut off on the way"
    else:
        why = "the server made fewer: its counter or its usage field is wrong, or replicas are missing from its metrics"
    return CrossCheck("disagree", after.dialect, client_tokens, made, why)


def settle(
    url: str, api_key: str, before: Reading | str, client_tokens: int, wait_s: float
) -> tuple[CrossCheck, Reading | str]:
    """Read until the counts agree or `wait_s` has passed; judge the last reading, and return it too."""
    deadline = time.monotonic() + wait_s
    while True:
        after = read(url, api_key)
        check = judge(before, after, client_tokens)
        exact = check.status == "agree" and check.off_by == 0
        if exact or check.status == "unavailable" or time.monotonic() >= deadline:
            return check, after
        time.sleep(0.2)
