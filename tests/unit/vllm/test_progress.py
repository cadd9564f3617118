"""What vLLM's processes tell of their start, and what is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.engines.vllm.engine import _progress
from service.engines.vllm.progress import CAPTURE, KERNELS, STEPS, VARIABLE, Journal, Told, follow, journal, read, then

READING = STEPS["load_model"]


class Runner:
    def capture_model(self) -> int:
        return 7


class Worker:
    """A worker's steps, as vLLM calls them."""

    def __init__(self, fails: str = "") -> None:
        self.model_runner, self._fails = Runner(), fails

    def _step(self, name: str) -> str:
        if name == self._fails:
            raise RuntimeError("out of memory")
        return name

    def init_device(self) -> str:
        return self._step("init_device")

    def load_model(self, *, load_dummy_weights: bool = False) -> str:
        return self._step("load_model")

    def determine_available_memory(self) -> str:
        return self._step("determine_available_memory")

    def initialize_from_config(self, config: object) -> str:
        return self._step("initialize_from_config")

    def compile_or_warm_up_model(self) -> int:
        self._step("compile_or_warm_up_model")
        return self.model_runner.capture_model()


def test_each_step_of_a_worker_is_a_phase(tmp_path: Path) -> None:
    worker, path = Worker(), tmp_path / "progress"
    follow(worker, Journal(path))
    assert worker.init_device() == "init_device"
    worker.load_model(load_dummy_weights=True)
    Journal(path).weights(25, 100, 2.0)
    assert read(path) == Told(("starting workers", READING), 25, 100, 2.0)
    worker.determine_available_memory()
    worker.initialize_from_config(None)
    assert worker.compile_or_warm_up_model() == 7
    told = read(path)
    assert told.phases == (*STEPS.values(), CAPTURE)
    assert (told.done, told.total) == (25, 100)


def test_more_is_done_after_a_step_as_a_phase_of_its_own(tmp_path: Path) -> None:
    worker, path, seen = Worker(), tmp_path / "progress", list[object]()
    then(worker, "load_model", seen.append, Journal(path))
    follow(worker, Journal(path))
    assert worker.load_model() == "load_model"
    assert seen == [worker]
    assert read(path).phases == (READING, KERNELS)
    silent = Worker()
    then(silent, "load_model", seen.append, None)
    silent.load_model()
    assert seen == [worker, silent]


def test_what_went_wrong_is_told(tmp_path: Path) -> None:
    worker, path = Worker(fails="load_model"), tmp_path / "progress"
    follow(worker, Journal(path))
    worker.init_device()
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.load_model()
    assert read(path).fault == "RuntimeError: out of memory"
    assert read(path).phases[-1] == READING


def test_a_load_that_nobody_watches_any_more_goes_on(tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "progress"
    own = Journal(gone)
    own.phase("reading weights")
    own.fault("nothing")
    assert not gone.parent.exists()


def test_rank_0_tells_and_only_where_somebody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert journal(0) is None
    monkeypatch.setenv(VARIABLE, str(tmp_path / "progress"))
    assert journal(0) == Journal(tmp_path / "progress")
    assert journal(1) is None


@pytest.mark.parametrize("content", ["{half", "[1]", "3", '{"phases": 3}', '{"odd": 1, "phases": []}', "{}"])
def test_a_file_that_makes_no_sense_says_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "progress"
    assert read(path) == Told()
    path.write_text(content)
    assert read(path) == Told()


def test_weights_have_a_fraction_and_an_eta() -> None:
    assert _progress(Told(), 3).phase == "starting vLLM"
    found = _progress(Told(("starting workers", READING), 25, 100, 2.0), 3)
    assert (found.phase, found.fraction, found.eta_s) == (READING, 0.25, 6.0)
    found = _progress(Told((READING,), 100, 100, 8.0), 9)
    assert (found.phase, found.fraction, found.eta_s) == (READING, None, None)
    assert _progress(Told((READING, "compiling"), 100, 100, 8.0), 9).detail == "9 s so far"
