"""What a person sees while the service starts: the phase, the seconds, what it waits for; then how to use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from service.terminal import one_line

AGAIN_S = 15.0
"""Without a terminal a phase that lasts says so this often: a line in a log is the only sign of life there."""


class StartProgress:
    """A live line on a terminal; elsewhere one line a phase, and another for each `AGAIN_S` that it lasts."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._model, self._console = escape(one_line(model)), Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._phase = ""
        self._began = self._phase_began = self._said = clock()

    def __enter__(self) -> StartProgress:
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, phase: str, detail: str) -> None:
        now = self._clock()
        phase, detail = escape(one_line(phase)), escape(one_line(detail))
        if phase != self._phase:
            if self._phase and self._status is not None:
                self._console.print(f"[green]✓[/] {self._phase} [dim]{now - self._phase_began:.1f} s[/]")
            self._phase, self._phase_began, self._said = phase, now, now - AGAIN_S
        if self._status is None and now - self._said >= AGAIN_S:
            self._said = now
            self._console.print(f"{now - self._began:6.1f} s  {phase}{f' ({detail})' if detail else ''}")
        if self._status is not None:
            waits = f" [dim]{detail}[/]" if detail else ""
            self._status.update(f"{phase} {now - self._phase_began:.0f} s{waits}")

    def ready(self, url: str) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        seconds = self._clock() - self._began
        self._phase = ""
        body = f'{{"model": "{self._model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        self._console.print(f"[bold green]ready[/] in {seconds:.1f} s: {self._model} at [bold]{url}/v1[/]\n")
        self._console.print(
            f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", soft_wrap=True
        )
        self._console.print(f"  glm5 chat --url {url}\n")
        self._console.print("[dim]Ctrl-C stops it.[/]")
