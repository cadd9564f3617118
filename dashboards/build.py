"""Dashboards as files: built from code into dashboards/out/, and compared with it."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

from dashboards import gpu_box, serving
from dashboards.panels import Board, grafana

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"


def boards() -> dict[str, Board]:
    """File name -> dashboard."""
    return {"serving.json": serving.board(), "gpu-box.json": gpu_box.board()}


def render() -> dict[str, str]:
    """File name -> text, as it belongs into dashboards/out/."""
    return {name: json.dumps(grafana(board), indent=1, sort_keys=True) + "\n" for name, board in boards().items()}


def drift(out: Path = OUT) -> list[str]:
    """What differs between the code and the files: unified differences, empty where nothing does."""
    wanted = render()
    found: list[str] = []
    for name in sorted({*wanted, *(path.name for path in out.glob("*.json"))}):
        path = out / name
        there = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = difflib.unified_diff(
            *(there.splitlines(), wanted.get(name, "").splitlines()),
            *(f"{name} in {out.name}/", f"{name} from the code"),
            lineterm="",
        )
        found += lines
    return found


def write(out: Path = OUT) -> list[Path]:
    """Write all files, remove those that no dashboard owns any more. Returns what was written."""
    out.mkdir(exist_ok=True)
    wanted = render()
    for path in out.glob("*.json"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in wanted]
