"""Watches the two processes of a local Ray without which nothing goes on: gcs_server and raylet.

Ray itself tells late or never: after kill -9 of its raylet every request hangs, and a lost gcs_server is noticed after
60 s. So their pids are watched.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

import psutil

NAMES = ("gcs_server", "raylet")
LOOK_S = 1.0
GRACE_S = 8.0
"""From the loss until the process ends in any case: a call to a Ray that is gone may never return."""


class Vigil:
    """`lost`: what ended, in words; empty while all live. Sets `stop` at a loss."""

    def __init__(self, stop: threading.Event) -> None:
        self.lost = ""
        self._stop, self._over = stop, threading.Event()
        self._watched = {child.name(): child for child in psutil.Process().children() if child.name() in NAMES}
        if self._watched:  # not where we joined a Ray that others look after
            threading.Thread(target=self._watch, name="vigil", daemon=True).start()

    def over(self) -> None:
        """Ray may end now."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            gone = next((name for name, process in self._watched.items() if not _lives(process)), None)
            if gone is not None:
                self.lost = f"Ray's {gone} (process {self._watched[gone].pid}) ended"
                break
        else:
            return
        self._stop.set()
        if not self._over.wait(GRACE_S):
            sys.stderr.write(f"error: {self.lost}; the service cannot go on without it\n")
            sys.stderr.flush()
            os._exit(1)  # the warden ends what we started


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
