"""A run on disk: runs/NAME/ with environment.json, summary.json, requests.jsonl and table.md.

Written after every level, so that a run that was cut short keeps what it had.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from loadtest import records as record_lines
from loadtest import tables
from loadtest.counters import CrossCheck
from loadtest.metrics import Goodput, Measured, Spread
from loadtest.records import Record
from loadtest.verdict import ClientLoad, LevelSummary
from service.errors import UserError

FORMAT = 1


@dataclass(slots=True)
class Run:
    """A finished or growing run."""

    path: Path
    environment: dict[str, Any]
    levels: list[LevelSummary] = field(default_factory=list)
    interrupted: bool = False

    @property
    def label(self) -> str:
        return self.environment.get("label") or self.path.name

    @property
    def gpus(self) -> int:
        return int(self.environment.get("gpus") or 0)

    @property
    def open_loop(self) -> bool:
        return any(level.rate for level in self.levels)

    def loads(self) -> list[float]:
        return sorted({level.load for level in self.levels})

    def at(self, load: float) -> list[LevelSummary]:
        """Repeats of one level, in the order of their repeat numbers."""
        return sorted((x for x in self.levels if x.load == load), key=lambda x: x.repeat)


def create(path: Path, environment: dict[str, Any], *, overwrite: bool = False) -> Run:
    """Raises UserError when a run is there already, or the place cannot be written."""
    if (path / "summary.json").exists() and not overwrite:
        raise UserError(f"{path} already holds a run; choose another --out or pass --overwrite")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "requests.jsonl").write_bytes(b"")
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    run = Run(path, environment)
    _write_json(path / "environment.json", environment)
    save(run)
    return run


def add(run: Run, level: LevelSummary, records: list[Record], origin: float) -> None:
    record_lines.append(run.path / "requests.jsonl", records, level.index, origin)
    run.levels.append(level)
    save(run)


def save(run: Run) -> None:
    _write_json(
        run.path / "summary.json",
        {"format": FORMAT, "interrupted": run.interrupted, "levels": [level_json(level) for level in run.levels]},
    )
    (run.path / "table.md").write_text(tables.markdown(tables.sweep_rows(run.levels)) + "\n")


def level_json(level: LevelSummary) -> dict[str, Any]:
    raw = dataclasses.asdict(level)
    raw["valid"] = level.valid
    if level.crosscheck is not None:
        raw["crosscheck"]["off_by"] = level.crosscheck.off_by
    return raw


def load(path: Path) -> Run:
    """Raises UserError when `path` is no run."""
    try:
        summary = orjson.loads((path / "summary.json").read_bytes())
        environment = orjson.loads((path / "environment.json").read_bytes())
    except OSError as error:
        raise UserError(
            f"{path} is no run: {error.filename} cannot be read; runs are made by `glm5 load sweep`"
        ) from error
    except orjson.JSONDecodeError as error:
        raise UserError(f"{path} holds a broken file: {error}") from error
    if summary.get("format") != FORMAT:
        raise UserError(f"{path} has format {summary.get('format')}, this version reads {FORMAT}")
    return Run(path, environment, [_level(raw) for raw in summary["levels"]], summary["interrupted"])


def _spread(raw: dict[str, Any]) -> Spread:
    """JSON has no NaN: what another tool did not say is null in the file."""
    told: dict[str, Any] = {key: float("nan") if value is None else value for key, value in raw.items()}
    return Spread(**told)


def _level(raw: dict[str, Any]) -> LevelSummary:
    measured = dict(raw["measured"])
    for name in ("ttft", "ttfa", "itl", "icl", "tpot", "e2el", "per_user_tok_s"):
        measured[name] = _spread(measured[name]) if measured[name] else None
    measured["goodput"] = Goodput(**measured["goodput"]) if measured["goodput"] else None
    check = raw["crosscheck"]
    if check is not None:
        check = CrossCheck(**{key: value for key, value in check.items() if key != "off_by"})
    kept = {key: value for key, value in raw.items() if key != "valid"}
    return LevelSummary(
        **kept
        | {
            "measured": Measured(**measured),
            "client": ClientLoad(**raw["client"]) if raw["client"] else None,
            "crosscheck": check,
            "reasons": tuple(raw["reasons"]),
            "notes": tuple(raw["notes"]),
        }
    )


def _write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a reader, or Ctrl-C, never meets half a file."""
    part = path.with_suffix(".part")
    part.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS))
    part.replace(path)
