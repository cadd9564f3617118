"""`glm5 warm`, and how long each phase of a start took."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli import app
from service.engines.phases import Phases
from service.errors import UserError
from service.types import LoadProgress
from tests.models import demo


def test_phases_have_their_time_in_their_order() -> None:
    now = 100.0
    phases = Phases(clock=lambda: now)
    for phase, detail, seconds in [("checking", "", 2.0), ("reading", "1 of 2", 1.0), ("reading", "2 of 2", 3.0)]:
        phases.say(LoadProgress(phase, detail))
        now += seconds
    assert (phases.past, phases.current) == ([("checking", 2.0)], "reading")
    phases.say(LoadProgress("ready"))
    phases.say(LoadProgress("checking"))
    assert phases.past == [("checking", 2.0), ("reading", 4.0), ("ready", 0.0)]


def test_a_report_names_the_phases_before_it() -> None:
    now = 0.0
    phases = Phases(clock=lambda: now)
    assert phases.told(LoadProgress("checking", "a.gguf")).detail == "a.gguf"
    now = 2.04
    reading = LoadProgress("reading weights", "1 of 2 GB", 0.5, 3.0)
    before = "before: checking 2.0 s"
    assert phases.told(reading) == LoadProgress("reading weights", f"1 of 2 GB; {before}", 0.5, 3.0)
    now = 4.0
    assert phases.told(LoadProgress("ready")).detail == f"{before}, reading weights 2.0 s"


@pytest.mark.timeout(120)
def test_a_model_is_started_and_ended_as_each_pool_says() -> None:
    pytest.importorskip("xllamacpp")
    done = CliRunner().invoke(app, ["warm", str(demo()), "--set=pools.shared.slots=1", "--set=model.context_tokens=64"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("shared: reading weights ")
    assert lines[-1].startswith("shared: llamacpp started in ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["warm", str(tmp_path / "no.gguf")])
    assert isinstance(done.exception, UserError)
    assert "no.gguf does not exist" in str(done.exception)
