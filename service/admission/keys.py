"""API keys: who a caller is and what they may take. The file holds hashes; a key itself is never kept or logged.

Each ingress process counts for itself and enforces its share of a key's limits. The shares add up to the limit, so that
together the ingresses never exceed it; a caller whose requests all reach one of two ingresses gets half.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.admission.share import Part
from service.errors import BadRequest, OperatorOnly, QuotaExceeded, Unauthorized, UserError
from service.strict_yaml import Bounds, read_yaml
from service.types import Delta, Tier

WINDOW_S = 60.0
MAX_KEY_CHARACTERS = 512
MAX_CONCURRENCY = 1_000_000
MAX_TOKENS_PER_MINUTE = 10**12
MAX_EXPIRES = 253_402_300_799  # the last second of the year 9999, the last that a calendar here can show
# Some 40,000 keys. Errors show no text of the file, which may hold a key that somebody wrote there by mistake.
FILE_BOUNDS = Bounds(bytes=8 << 20, nodes=400_000, quotes=False)


class KeyEntry(BaseModel):
    """One line of the keys file. `sha256`: hex digest of the key (keys are long and random, so one hash is enough)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    tier: Literal["priority", "default", "flex"] = "priority"
    concurrency: int | None = Field(None, ge=1, le=MAX_CONCURRENCY)
    tokens_per_minute: int | None = Field(None, ge=1, le=MAX_TOKENS_PER_MINUTE)
    operator: bool = Field(False, description="May ask for what concerns the whole service, such as /metrics")
    expires: float | None = Field(None, ge=0, le=MAX_EXPIRES, allow_inf_nan=False, description="Unix time")


class Limits(Protocol):
    """The part of `admission:` that concerns keys."""

    @property
    def keys_file(self) -> str | None: ...

    @property
    def anonymous(self) -> bool: ...

    @property
    def anonymous_tier(self) -> Tier: ...


@dataclass(eq=False)
class Caller:
    """One key's live books in this process. `spent`: (when, tokens) within the last minute. `part`: of the key's
    limits, what this process enforces."""

    name: str
    ceiling: Tier
    concurrency: int | None = None
    tokens_per_minute: int | None = None
    operator: bool = False
    part: Part = field(default_factory=Part)
    running: int = 0
    spent: deque[tuple[float, int]] = field(default_factory=deque)

    @contextmanager
    def spend(self, siblings: int) -> Iterator[Spending]:
        """Hold one place of the caller's concurrency, for one of `siblings` answers that a request asked for at once.

        Raises QuotaExceeded where trying again can help, BadRequest where it cannot.
        """
        if self.concurrency is not None:
            self._check_concurrency(self.concurrency, siblings)
        if self.tokens_per_minute is not None:
            self._check_tokens(time.monotonic())
        self.running += 1
        try:
            yield Spending(self)
        finally:
            self.running -= 1

    def _check_concurrency(self, limit: int, siblings: int) -> None:
        most = self.part.largest(limit)
        if siblings > most:
            where = f", shared by {self.part.of} ingresses: {most} at one" if self.part.of > 1 else ""
            raise BadRequest(
                f"n: this request asks for {siblings} answers at once (n for each prompt), but this key may run "
                f"{limit} at once{where}; ask for at most {most} in one request",
                param="n",
            )
        if self.running >= self.part.share(limit):
            raise QuotaExceeded(f"this key may run {limit} requests at once", retry_after_s=1.0)

    def _check_tokens(self, now: float) -> None:
        """What was used counts: a request that starts within the limit may end beyond it, and the next one waits."""
        assert self.tokens_per_minute is not None
        limit = self.part.share(self.tokens_per_minute)
        while self.spent and self.spent[0][0] <= now - WINDOW_S:
            self.spent.popleft()
        used = sum(tokens for _, tokens in self.spent)
        if used < limit:
            return
        over, after = used - limit, 1.0
        for when, tokens in self.spent:
            over -= tokens
            after = max(1.0, when + WINDOW_S - now)
            if over < 0:
                break
        raise QuotaExceeded(
            f"this key used {used} of {limit} tokens in the last minute; try again in {after:.0f} s",
            retry_after_s=after,
        )


@dataclass(frozen=True)
class Spending:
    """Counts what one request really used, prompt and answer alike; per second, so that the books stay small."""

    caller: Caller

    def used(self, delta: Delta) -> None:
        tokens = delta.output_tokens + delta.prompt_tokens
        if self.caller.tokens_per_minute is None or not tokens:
            return
        now, spent = time.monotonic(), self.caller.spent
        if spent and now - spent[-1][0] < 1.0:
            spent[-1] = (spent[-1][0], spent[-1][1] + tokens)
        else:
            spent.append((now, tokens))


def read_entries(path: Path) -> list[KeyEntry]:
    """The keys file. Raises UserError where it is missing or wrong; the message names entries, never their hashes."""
    tree = read_yaml(path, "keys file", FILE_BOUNDS) or []
    if not isinstance(tree, list):
        raise UserError(f"keys file {path} must be a list of keys (name, sha256, ...); glm5 keys add writes it")
    entries = []
    for at, item in enumerate(tree):
        try:
            entries.append(KeyEntry.model_validate(item))
        except ValidationError as fault:
            what = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'entry'}: {e['msg']}" for e in fault.errors())
            raise UserError(f"keys file {path}, entry {at + 1}: {what}") from None
    for what in ("name", "sha256"):
        seen: set[str] = set()
        for entry in entries:
            value = getattr(entry, what)
            if value in seen:
                raise UserError(f"keys file {path}: two entries have the same {what} (the second is {entry.name!r})")
            seen.add(value)
    return entries


def digest(credential: str) -> bytes:
    """SHA-256 of a key as presented; a longer one than any real key is cut, so that hashing costs nothing."""
    return hashlib.sha256(credential[:MAX_KEY_CHARACTERS].encode("utf-8", "surrogatepass")).digest()


class KeyRing:
    """Finds the caller behind a credential."""

    def __init__(self, entries: list[KeyEntry], anonymous: Caller | None) -> None:
        self._anonymous = anonymous
        self._entries = [
            (bytes.fromhex(e.sha256), e.expires, Caller(e.name, e.tier, e.concurrency, e.tokens_per_minute, e.operator))
            for e in entries
        ]

    def divide(self, own: str, others: Iterable[str]) -> None:
        """The process `own` shares every key's limits with `others` (ids, among which it may be itself)."""
        part = Part.among(own, others)
        for _, _, caller in self._entries:
            caller.part = part

    @staticmethod
    def load(limits: Limits) -> KeyRing:
        """Raises UserError where the file is missing or wrong."""
        anonymous = Caller("anonymous", limits.anonymous_tier) if limits.anonymous else None
        if limits.keys_file is None:
            if anonymous is None:
                raise UserError("admission: anonymous is false and keys_file is empty, so nobody could ask anything")
            return KeyRing([], anonymous)
        return KeyRing(read_entries(Path(limits.keys_file).expanduser()), anonymous)

    def admit_operator(self, credential: str | None) -> None:
        """Pass who may see what concerns the service itself: an operator's key, and everybody where a caller needs no
        key at all. Raises Unauthorized, OperatorOnly."""
        caller = self.find(credential)
        if self._anonymous is None and not caller.operator:
            raise OperatorOnly("this needs an operator's key: glm5 keys add NAME --operator makes one")

    def find(self, credential: str | None) -> Caller:
        """Raises Unauthorized. Every entry is compared, in constant time each, whichever matches."""
        if credential is None or not self._entries:
            if self._anonymous is None:
                raise Unauthorized("an API key is needed: send the header Authorization: Bearer KEY")
            return self._anonymous
        presented = digest(credential)
        found: Caller | None = None
        expires: float | None = None
        for known, until, caller in self._entries:
            if hmac.compare_digest(known, presented):
                found, expires = caller, until
        if found is None:
            raise Unauthorized("the API key is not known")
        if expires is not None and time.time() >= expires:
            raise Unauthorized("the API key has expired")
        return found
