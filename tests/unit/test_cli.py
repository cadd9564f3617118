"""The command line as a newcomer meets it: help, version, addresses, names, silence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console

from service.address import base_url
from service.cli import AREAS, app
from service.config import parse
from service.errors import UserError
from service.metrics.cli import render
from service.metrics.top import Figures
from service.planning import hardware
from service.planning import plan as planner
from service.planning.settings import EngineSettings
from service.planning.sources import model_shape
from service.progress import AGAIN_S, StartProgress

ROOT = Path(__file__).resolve().parents[2]
GLM5 = str(Path(sys.executable).with_name("glm5"))
COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GLM5, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", [(), ("serve",), ("keys", "add"), ("config", "show"), ("plan",), ("check",)])
def test_short_help_is_the_long_one(command: tuple[str, ...]) -> None:
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short.returncode == 0
    assert "Usage" in short.stdout
    assert short.stdout == long.stdout


def test_the_version_is_an_option_too() -> None:
    assert run("--version").stdout == run("version").stdout
    assert re.fullmatch(r"glm5-serve \d+\.\d+\.\d+\n", run("--version").stdout)


def test_the_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text().split("| command | what it does |")[1].split("\n\n")[0]
    missing = [name for name in COMMANDS if not re.search(rf"`(glm5 )?{name}\b", table)]
    assert set(AREAS) <= set(COMMANDS)
    assert not missing


def test_the_demo_model_can_be_checked() -> None:
    done = run("check", "demo")
    assert done.returncode == 0, done.stderr
    assert "SmolLM2" in done.stdout or "Smollm2" in done.stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("box", "http://box"),
        ("https://box:1/", "https://box:1"),
        (" [::1]:8000 ", "http://[::1]:8000"),
    ],
)
def test_an_address_needs_no_scheme(typed: str, meant: str) -> None:
    assert base_url(typed) == meant


@pytest.mark.parametrize("typed", ["", "ftp://box", "http://", "box:port", "box:99999", "a b", "http://[::1"])
def test_what_is_no_address_is_said(typed: str) -> None:
    with pytest.raises(UserError, match=r"--url .*http://HOST:PORT"):
        base_url(typed)


@pytest.mark.parametrize("command", [("chat",), ("top", "--once"), ("explain", "--seconds", "0")])
def test_every_command_takes_host_and_port(command: tuple[str, ...]) -> None:
    done = run(*command, "--url", "127.0.0.1:1")
    assert done.returncode == 2
    assert "http://127.0.0.1:1" in done.stderr


def test_an_engines_typo_is_named_in_our_words() -> None:
    with pytest.raises(UserError) as fault:
        parse({"pools": {"shared": {"engine": {"name": "lamacpp"}}}})
    assert str(fault.value) == (
        "profile: pools.shared.engine.name: unknown engine 'lamacpp'; engines are llamacpp, simulated, vllm; "
        "did you mean llamacpp?"
    )


def test_where_nothing_fits_nothing_is_best(tmp_path: Path) -> None:
    profile = tmp_path / "p.yaml"
    done = run("plan", "--shape", "glm-5", "--hardware", "cpu-2core", "-o", str(profile))
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert "best" not in done.stdout
    assert "tok/s" not in done.stdout
    assert "is not written" in done.stderr
    assert not profile.exists()
    box = hardware.box("1x-h200")
    plan = planner.make(model_shape("demo"), box, EngineSettings(tp=1, slots=8), context=2048, concurrency=8)
    assert [mode.aim for mode in plan.modes] == ["latency", "throughput"]


def test_the_list_shows_sizes() -> None:
    shown = run("plan", "--list").stdout
    assert re.search(r"glm-5 +402\.2 +\d+\.\d", shown)
    assert re.search(r"8x-rtx-pro-6000 +\d+ +\d+ +8 x", shown)
    assert re.search(r"demo +0\.1", shown)


def test_a_long_phase_is_heard_of_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    progress = StartProgress("m", lambda: now)
    with progress:
        for second in range(int(3 * AGAIN_S)):
            now = float(second)
            progress.say("compiling", f"step {second}")
        progress.say("warming", "")
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[2:4] for line in told] == [["compiling", "(step"]] * 3 + [["warming"]]
    assert [float(line.split()[0]) for line in told] == [0.0, AGAIN_S, 2 * AGAIN_S, 3 * AGAIN_S - 1]


def test_top_without_a_replica_says_why() -> None:
    console = Console(width=200)
    with console.capture() as got:
        console.print(render(Figures((), 0, 0.0, 0.0, 0.0)))
    assert "no replica has started yet" in got.get()
