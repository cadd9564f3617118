"""The deadlines of one streaming answer, decided from the moments at which things happened. Pure: has no clock."""

from __future__ import annotations

from dataclasses import dataclass

from service.errors import DeadlineExceeded
from service.http.settings import HttpSettings


class ClientStalled(Exception):
    """The client has stopped reading; there is nobody to tell."""


@dataclass(slots=True)
class Pulse:
    """Moments on the loop's clock, seconds; None while a thing has not happened.

    `served_at`: admission. `heard_at`: the last chunk. `sent_at`: the last bytes to the client. `writing`: a write is
    under way, so silence is the client's.
    """

    started_at: float
    timeout_s: float
    served_at: float | None = None
    heard_at: float | None = None
    sent_at: float | None = None
    writing: bool = False

    def judge(self, now: float, settings: HttpSettings) -> tuple[bool, float]:
        """(whether a keep-alive comment is due, when to ask again). Raises DeadlineExceeded, ClientStalled."""
        ends = self.started_at + self.timeout_s
        if now >= ends:
            raise DeadlineExceeded(f"the request took longer than its {self.timeout_s:g} s")
        if self.heard_at is not None:
            silent = self.heard_at + settings.idle_timeout_s
            if now >= silent:
                if self.writing:
                    raise ClientStalled
                raise DeadlineExceeded(f"the engine sent nothing for {settings.idle_timeout_s:g} s")
        elif self.served_at is not None:
            silent = self.served_at + settings.first_byte_timeout_s
            if now >= silent:
                raise DeadlineExceeded(f"the engine sent nothing for its first {settings.first_byte_timeout_s:g} s")
        else:
            silent = now + settings.first_byte_timeout_s
        # The next chunk may come right after this look, and its silence is counted from there.
        silent = min(silent, now + settings.idle_timeout_s)
        if self.sent_at is not None:
            speak_at = self.sent_at + settings.keepalive_s
        else:
            speak_at = self.started_at + settings.open_stream_after_s
        due = now >= speak_at and not self.writing
        if now >= speak_at:
            speak_at = now + settings.keepalive_s
        elif self.sent_at is None:  # the headers, too, may go out right after this look
            speak_at = min(speak_at, now + settings.keepalive_s)
        return due, min(ends, silent, speak_at)
