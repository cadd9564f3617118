"""A against B on one machine: two servers in turn, their repeats interleaved (AB BA AB ...) so that drift cancels."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from service.errors import UserError

_STOP_S = 60.0


def order(repeats: int) -> list[tuple[int, str]]:
    """(repeat, side) in the order of measuring: every second pair backwards, so that linear drift cancels."""
    out: list[tuple[int, str]] = []
    for repeat in range(repeats):
        pair = ("before", "after") if repeat % 2 == 0 else ("after", "before")
        out += [(repeat, side) for side in pair]
    return out


def command_for(template: str, profile: str, port: int) -> list[str]:
    """`{profile}` and `{port}` filled in. Raises UserError when the template lacks one or names another."""
    try:
        parts = [part.format(profile=profile, port=port) for part in shlex.split(template)]
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"--command {template!r}: only {{profile}} and {{port}} can stand in braces ({error})"
        ) from error
    if "{port}" not in template or "{profile}" not in template:
        raise UserError(f"--command {template!r} must contain {{profile}} and {{port}}")
    return parts


@contextlib.contextmanager
def server(
    command: list[str], url: str, log: Path, start_timeout_s: float, waiting: Callable[[float], None]
) -> Iterator[None]:
    """Start `command` in its own process group, wait for GET url/ready, and end the whole group afterwards.

    `waiting(seconds)` is called while it loads. Raises UserError with the log's end when it dies or takes too long.
    """
    if _ready(url):
        raise UserError(f"something already serves {url}; stop it or choose another --port")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    except OSError as error:
        raise UserError(f"cannot start {command[0]!r}: {error.strerror}") from error
    try:
        begin = time.monotonic()
        while not _ready(url):
            took = time.monotonic() - begin
            if process.poll() is not None:
                raise UserError(
                    f"{shlex.join(command)} ended with {process.returncode} before it was ready:\n{_tail(log)}"
                )
            if took > start_timeout_s:
                raise UserError(f"{shlex.join(command)} was not ready after {start_timeout_s:.0f} s:\n{_tail(log)}")
            waiting(took)
            time.sleep(0.25)
        yield
    finally:
        _end(process)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, ValueError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C would end it; SIGTERM where that is not heard; SIGKILL to what is left of its group."""
    # In the background of a script (`&`, nohup) SIGINT is ignored, and what we start inherits that.
    deaf = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    orders = ((signal.SIGTERM, _STOP_S),) if deaf else ((signal.SIGINT, _STOP_S), (signal.SIGTERM, 10.0))
    for order, wait_s in orders:
        if process.poll() is None:
            process.send_signal(order)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
