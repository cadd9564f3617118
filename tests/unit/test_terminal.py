"""What files, profiles, models and servers say cannot steer the terminal that shows it."""

from __future__ import annotations

import io
import json
import sys
import threading
import unicodedata
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from service import chat, cli
from service.gguf.cli import check
from service.gguf.errors import GgufError
from service.metrics.top import Scrape
from service.planning.cli import plan_app
from service.progress import StartProgress
from service.terminal import lines, one_line
from tests.unit.gguf.build import Tensor
from tests.unit.gguf.test_rules import llama

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x00\x7f\r\u202ecod.exe\u2066\u2028[/red][bold]$\\frac$"
app = typer.Typer()
app.command()(check)


def steers(text: str) -> set[str]:
    """Characters that a terminal would obey; newlines and tabs aside."""
    kinds = {unicodedata.bidirectional(c): c for c in text}
    reorder = {kinds[k] for k in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI") if k in kinds}
    return reorder | {c for c in text if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs") and c not in "\n\t"}


def test_every_character_that_steers_is_shown_as_its_escape() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not steers(lines(every)) and not steers(one_line(every))
    assert lines("a\tb\n\x1b[0m\u200f") == "a\tb\n\\x1b[0m\\u200f"
    assert one_line("a\tb\n") == "a\\x09b\\x0a"
    spared = "".join(c for c in every if c not in lines(c))
    assert all(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in spared)
    # Persian, Indic scripts and emoji need the joiners.
    assert lines("\u200c\u200d \u00e9 \U0001f600") == "\u200c\u200d \u00e9 \U0001f600"


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    return llama(**{"general.name": EVIL}).write(tmp_path / "evil.gguf")


def test_check_shows_a_files_text_harmlessly(evil: Path, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, [str(evil)], env={"COLUMNS": "300"})
    assert shown.exit_code == 0, shown.output
    assert not steers(shown.output) and "\\x1b]0;owned" in shown.output and "[/red]" in shown.output
    asjson = CliRunner().invoke(app, [str(evil), "--json"])
    assert not steers(asjson.output)
    long = llama(**{"general.name": "x" * 100_000}).write(tmp_path / "long.gguf")
    assert len(CliRunner().invoke(app, [str(long)]).output) < 5000
    file = llama(**{"tokenizer.ggml.pre\x1b": EVIL})
    file.keys[6] = ("tokenizer.ggml.pre", EVIL)
    file.tensors.append(Tensor(f"blk.0.{EVIL}.weight", (64, 64), 8))
    file.tensors.append(Tensor("blk.\u0661.x.weight", (64, 64), 8))
    refused = CliRunner().invoke(app, [str(file.write(tmp_path / "names.gguf"))], env={"COLUMNS": "300"})
    assert refused.exit_code == 1 and not steers(refused.output), refused.exception


def test_plan_shows_a_files_name_harmlessly(evil: Path, tmp_path: Path) -> None:
    target, picture = tmp_path / "profile.yaml", tmp_path / "plan.svg"
    shown = CliRunner().invoke(
        plan_app, [str(evil), "--hardware", "8x-rtx-pro-6000", "-o", str(target), "--plot", str(picture)]
    )
    assert not isinstance(shown.exception, Exception), shown.exception
    assert not steers(shown.output) and "owned" in shown.output
    assert picture.stat().st_size > 0


def test_a_files_name_adds_no_line_to_the_profile_that_plan_writes(tmp_path: Path) -> None:
    file = llama(**{"general.name": "x\nhttp: {host: 0.0.0.0}\x85ingress: {}\u2028"}).write(tmp_path / "a.gguf")
    target = tmp_path / "profile.yaml"
    CliRunner().invoke(plan_app, [str(file), "--hardware", "cpu-2core", "-o", str(target)])
    assert target.read_text().startswith("# Written by glm5 plan for x\\x0ahttp")
    assert "\nhttp" not in target.read_text()


def test_errors_are_shown_harmlessly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["glm5", "config", "check", "--set", f"{EVIL}=1"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert "owned" in told and not steers(told)
    assert len(str(GgufError("a\nb", "key\x1b", EVIL)).splitlines()) == 1


class Hostile(BaseHTTPRequestHandler):
    """A server whose model's name and answer are EVIL."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": EVIL}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        events = [
            json.dumps({"choices": [{"delta": {"content": piece}}]}, ensure_ascii=False)  # as orjson writes it
            for piece in ("a\tb\n", *EVIL, "one\u2028two\u2029three\x85four")
        ]
        events.insert(1, json.dumps({"choices": None, "error": None}))
        self._send("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]))

    def _send(self, body: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hostile() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_models_answer_is_shown_harmlessly(
    hostile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    chat.run(hostile, None, None, None, 8, 0.0)
    out = capsys.readouterr().out
    assert "a\tb\n" in out and "owned" in out and not steers(out)
    assert "one\\u2028two\\u2029three\\x85four" in out


def test_progress_and_labels_are_shown_harmlessly() -> None:
    progress = StartProgress(EVIL)
    progress._console = Console(file=io.StringIO(), width=200)
    progress.say(EVIL, EVIL)
    progress.ready("http://127.0.0.1:1")
    shown = progress._console.file.getvalue()  # type: ignore[attr-defined]
    assert not steers(shown) and "[/red]" in shown
    scrape = Scrape.parse('a{pool="x\x1b[2J"} 1\n', 0.0)
    assert scrape.values("a", "pool") == ["x\\x1b[2J"]
