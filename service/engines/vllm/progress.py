"""Where a start stands, told by vLLM's processes in a file: phases in their order, and bytes of weights.

The file's path travels in the environment, not in vLLM's `additional_config`: that is part of the key of vLLM's compile
cache, and a fresh path there would have every start compile anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import orjson

VARIABLE = "GLM5_PROGRESS_FILE"

STEPS = {
    "init_device": "starting workers",
    "load_model": "reading weights",
    "determine_available_memory": "compiling",
    "initialize_from_config": "allocating KV",
    "compile_or_warm_up_model": "warming vLLM",
}
"""A worker's methods, in the order in which vLLM calls them, and the phase that each begins."""

CAPTURE = "capturing graphs"
KERNELS = "compiling kernels"
STARTING = "starting vLLM"


@dataclass(frozen=True, slots=True)
class Told:
    """What the file says: phases so far, bytes of weights `done` of `total` after `seconds`, and what went wrong."""

    phases: tuple[str, ...] = ()
    done: int = 0
    total: int = 0
    seconds: float = 0.0
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Journal:
    """The writing end. Only rank 0's worker writes, so that it may read, change and replace."""

    path: Path

    def phase(self, name: str) -> None:
        """`name` begins."""
        told = read(self.path)
        self._write(replace(told, phases=(*told.phases, name)))

    def weights(self, done: int, total: int, seconds: float) -> None:
        self._write(replace(read(self.path), done=done, total=total, seconds=seconds))

    def fault(self, reason: str) -> None:
        self._write(replace(read(self.path), fault=reason))

    def _write(self, told: Told) -> None:
        """Nothing where the folder is gone: then nobody watches this load any more."""
        fresh = self.path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            fresh.write_bytes(orjson.dumps(told))
            fresh.replace(self.path)


def read(path: Path) -> Told:
    """The reading end. A file that is not there (yet) says nothing."""
    try:
        found = orjson.loads(path.read_bytes())
        return Told(**(found | {"phases": tuple(found["phases"])}))
    except (OSError, orjson.JSONDecodeError, TypeError, KeyError):
        return Told()


def journal(rank: int) -> Journal | None:
    """This process's, where somebody wants to know (plain `vllm serve` has none) and the rank is the one that tells."""
    path = os.environ.get(VARIABLE)
    return Journal(Path(path)) if path and rank == 0 else None


def then(worker: Any, name: str, more: Callable[[Any], None], own: Journal | None) -> None:
    """Have `more(worker)` done after the method `name` of `worker`, as a phase of its own."""
    method = getattr(worker, name)

    @wraps(method)
    def both(*given: Any, **named: Any) -> Any:
        found = method(*given, **named)
        if own is not None:
            own.phase(KERNELS)
        more(worker)
        return found

    setattr(worker, name, both)


def follow(worker: Any, own: Journal) -> None:
    """Have `worker`, one of vLLM's, tell its steps."""

    def telling(method: Any, phase: str) -> Any:
        @wraps(method)
        def step(*given: Any, **named: Any) -> Any:
            own.phase(phase)
            try:
                return method(*given, **named)
            except BaseException as fault:
                # vLLM's front only hears that its engine did not start.
                own.fault(f"{type(fault).__name__}: {fault}")
                raise

        return step

    for name, phase in STEPS.items():
        setattr(worker, name, telling(getattr(worker, name), phase))
    warming = worker.compile_or_warm_up_model

    @wraps(warming)
    def compile_or_warm_up_model(*given: Any, **named: Any) -> Any:
        runner = worker.model_runner
        if hasattr(runner, "capture_model"):
            runner.capture_model = telling(runner.capture_model, CAPTURE)
        return warming(*given, **named)

    worker.compile_or_warm_up_model = compile_or_warm_up_model
