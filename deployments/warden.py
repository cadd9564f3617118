"""Ends every process that one `glm5 serve` started, also where that was killed and could not do it itself.

`python -m deployments.warden HOME PID` waits until its standard input ends, which it does when process PID closes it or
dies; then it ends what is left and removes the folder HOME. Ray's own processes cannot be trusted with it: its agents
outlive a killed parent, and what they once were called stands neither in their titles nor in their environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

POLITE_S = 5.0
"""From SIGTERM to SIGKILL."""
END_S = 10.0
"""Longest that the whole end may take."""
NOW = b"now"
"""Said before the input ends: SIGKILL at once, for what is left can end nothing in order."""


class Warden:
    """The warden's process, as the one that it watches holds it. Start it before whatever it is to end."""

    def __init__(self, home: Path) -> None:
        # A session of its own: Ctrl-C, or a SIGKILL to the whole group, is not for it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deployments.warden", str(home), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, *, now: bool = False) -> None:
        """Have everything ended, and wait for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(NOW if now else b"", timeout=END_S + POLITE_S)


def started_by(parent: int, home: Path) -> list[psutil.Process]:
    """Live processes that descend from `parent`, have its token in their environment, or write into its Ray session.

    Each sign alone misses some: orphans have another parent, and a process that changed its title has no environment.
    """
    import psutil

    session, found = re.compile(rf"/session_[^/]*_{parent}/"), []
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(parent).children(recursive=True)
    for process in psutil.process_iter():
        if process.pid in (os.getpid(), parent):
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            writes = (file.path for file in process.open_files() if getattr(file, "mode", "a") != "r")
            if (
                process in descendants
                or process.environ().get("RAY_AUTH_TOKEN_PATH", "").startswith(f"{home}/")
                or any(session.search(path) for path in writes)
            ):
                found.append(process)
    return found


def end(parent: int, home: Path, polite_s: float) -> None:
    """SIGTERM, and SIGKILL after `polite_s`, until nothing is left."""
    import psutil

    began = time.monotonic()
    while (left := started_by(parent, home)) and time.monotonic() - began < END_S:
        kill = time.monotonic() - began >= polite_s
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        psutil.wait_procs(left, timeout=0.5)
    shutil.rmtree(home, ignore_errors=True)


def main() -> None:
    home, parent = Path(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends after its parent, not with it
    said = sys.stdin.buffer.read()
    end(parent, home, 0.0 if said == NOW else POLITE_S)


if __name__ == "__main__":
    main()
