"""Check the model against numbers that nobody here produced: fit on half of the published rows, report on the rest.

    python -m service.planning.backtest            # the tables of docs/planning.md
    python -m service.planning.backtest --write    # also data/calibration.json and the tables in docs/planning.md

Rows are halved by condition (family, MTP, context, concurrency) like a checkerboard, before looking at the result; runs
that repeat a condition fall into the same half, so no row is predicted from its own repetition.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Literal

from service.planning import hardware
from service.planning.calibration import FILE
from service.planning.fit import least_squares
from service.planning.hardware import DATA
from service.planning.settings import Calibration, EngineSettings, Family
from service.planning.sources import model_shape
from service.planning.step_model import StepModel

Half = Literal["fit", "held out", "never fitted"]
GOAL = 0.15
POWERS = tuple(2**i for i in range(13))
# SGLang's NEXTN defaults: 3 draft steps, top-1, 4 tokens verified. The write-ups do not say otherwise.
DRAFTS = 3
KNOTS = (1.0, 8.0, 16.0, 64.0, 128.0)  # none beyond the largest fitted batch: it would be a guess
MAX_SHARE = 0.95  # no kernel reads faster than the datasheet


@dataclass(frozen=True, slots=True)
class Row:
    """One published number. `kind` groups rows measured the same way; `family` the kernels they ran."""

    kind: str
    family: Family
    mtp: bool
    context: int
    concurrency: int
    tok_s: float
    half: Half
    note: str

    @property
    def condition(self) -> tuple[str, bool, int, int]:
        return self.family, self.mtp, self.context, self.concurrency


@dataclass(frozen=True, slots=True)
class Result:
    row: Row
    predicted: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.row.tok_s - 1.0


def published_rows() -> list[Row]:
    """throughput_points.csv. The grids of models/glm5.md are halved; other write-ups (other dates, versions, drivers,
    chat reports, one-shot all-reduce experiments) are never fitted."""
    with (DATA / "throughput_points.csv").open(newline="") as file:
        raw = list(csv.DictReader(file))
    contexts = sorted({int(r["context"]) for r in raw})
    rows = []
    for r in raw:
        note = r["notes"]
        mtp = r["mtp"] != "off"
        grid = note.startswith("moe=")
        family: Family = "nvfp4-b12x" if "b12x" in note else "nvfp4-cutlass"
        context, concurrency = int(r["context"]), int(r["concurrency"])
        half: Half = "never fitted"
        kind = "other write-ups"
        if grid:
            colour = contexts.index(context) + concurrency.bit_length() + mtp
            half = "fit" if colour % 2 else "held out"
            kind = f"{family.removeprefix('nvfp4-')}, MTP {'on' if mtp else 'off'}"
        rows.append(Row(kind, family, mtp, context, concurrency, float(r["tok_s"]), half, note or r["mtp"]))
    return rows


def reference_rows() -> list[Row]:
    """The reference deployment's table, halved like a checkerboard. Context: unknown, taken as 200 tokens."""
    rows = []
    with (DATA / "reference_table.csv").open(newline="") as file:
        for i, r in enumerate(csv.DictReader(file)):
            for j, column in enumerate(("eager", "graph")):
                half: Half = "held out" if (i + j) % 2 else "fit"
                kind = f"reference, {column}"
                rows.append(Row(kind, "plugin", False, 200, int(r["concurrency"]), float(r[column]), half, column))
    return rows


@lru_cache(maxsize=4)
def _published(family: Family, mtp: bool) -> StepModel:
    settings = EngineSettings(
        tp=8,
        runtime="sglang",
        kernels=family,
        graphs=True,
        capture_sizes=POWERS,
        draft_tokens=DRAFTS if mtp else 0,
        slots=4096,
    )
    return StepModel(model_shape("glm-5-nvfp4"), hardware.box("8x-rtx-pro-6000"), settings)


@lru_cache(maxsize=2)
def _reference(graphs: bool) -> StepModel:
    """vLLM's default of 256 sequences caps the table: its rows at 256 and 1024 users agree within 6 %."""
    settings = EngineSettings(tp=8, kernels="plugin", graphs=graphs, slots=256)
    return StepModel(model_shape("glm-5"), hardware.box("8x-rtx-pro-6000-reference"), settings)


def predict(row: Row, calibration: Calibration, acceptance: float | None = None) -> float:
    """Aggregate tok/s that the model gives for a published row."""
    if row.family == "plugin":
        model = _reference("graph" in row.kind)
    else:
        model = _published(row.family, row.mtp)
        if acceptance is not None and row.mtp:
            model = replace(model, settings=replace(model.settings, acceptance=acceptance))
    return replace(model, calibration=calibration).tokens_per_s(row.concurrency, row.context)


def nvfp4_calibration(values: Sequence[float]) -> tuple[Calibration, float]:
    """Parameters of an nvfp4 family: overhead per layer, KV share, expert bandwidth share at KNOTS, acceptance odds."""
    overhead, kv, odds, *shares = values
    fitted = Calibration(
        layer_overhead_s=overhead,
        kv_efficiency=kv,
        moe_efficiency=tuple((m, min(MAX_SHARE, e)) for m, e in zip(KNOTS, shares, strict=True)),
        linear_efficiency=0.7,
        launches_per_layer=0.0,
        host_request_s=0.0,
    )
    return fitted, odds / (1.0 + odds)


def fit_nvfp4(rows: Iterable[Row]) -> tuple[Calibration, float]:
    training = [r for r in rows if r.half == "fit"]

    def residuals(values: Sequence[float]) -> list[float]:
        calibration, acceptance = nvfp4_calibration(values)
        return [log(predict(r, calibration, acceptance) / r.tok_s) for r in training]

    return nvfp4_calibration(least_squares(residuals, (50e-6, 0.5, 2.0, *([0.5] * len(KNOTS)))))


def reference_calibration(values: Sequence[float]) -> Calibration:
    kernel, allreduce, eager = values
    return Calibration(kernel_scale=kernel, allreduce_scale=allreduce, eager_layer_s=eager)


def fit_reference(rows: Iterable[Row]) -> Calibration:
    training = [r for r in rows if r.half == "fit"]

    def residuals(values: Sequence[float]) -> list[float]:
        return [log(predict(r, reference_calibration(values)) / r.tok_s) for r in training]

    return reference_calibration(least_squares(residuals, (1.0, 1.0, 600e-6)))


@dataclass(frozen=True)
class BackTest:
    """Everything that the back-test found."""

    results: list[Result]
    reference: list[Result]
    unfitted_reference: list[Result]
    calibrations: dict[str, Calibration]
    acceptance: dict[str, float]

    def mean_error(self, kind: str, half: Half) -> tuple[int, float]:
        """(rows, mean absolute relative error)."""
        errors = [abs(r.error) for r in self.results + self.reference if r.row.kind == kind and r.row.half == half]
        return len(errors), sum(errors) / len(errors) if errors else 0.0

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(r.row.kind for r in self.results + self.reference))


@lru_cache(maxsize=1)
def run() -> BackTest:
    rows, table = published_rows(), reference_rows()
    calibrations: dict[str, Calibration] = {}
    acceptance: dict[str, float] = {}
    results: list[Result] = []
    for family in ("nvfp4-cutlass", "nvfp4-b12x"):
        mine = [r for r in rows if r.family == family]
        fitted, chance = fit_nvfp4(mine)
        found = [Result(r, predict(r, fitted, chance)) for r in mine]
        calibrations[family] = _graded(fitted, found, "half of the published SGLang NVFP4 grid")
        acceptance[family] = chance
        results += found
    fitted = fit_reference(table)
    reference = [Result(r, predict(r, fitted)) for r in table]
    graded = _graded(fitted, reference, "half of the reference deployment's table")
    calibrations["reference"] = graded
    calibrations["plugin"] = graded
    plain = [Result(r, predict(r, Calibration())) for r in table]
    return BackTest(results, reference, plain, calibrations, acceptance)


def _graded(fitted: Calibration, results: Iterable[Result], source: str) -> Calibration:
    """With its error: nine of ten held-out rows fall within it."""
    errors = sorted(abs(r.error) for r in results if r.row.half == "held out")
    return replace(fitted, error=round(errors[min(len(errors) - 1, int(0.9 * len(errors)))], 3), source=source)


# -- the tables of docs/planning.md


def summary(test: BackTest) -> str:
    lines = [
        "| kind | fitted rows | error there | held-out rows | error there | 15 % goal |",
        "|---|---|---|---|---|---|",
    ]
    for kind in test.kinds:
        fit_n, fit_error = test.mean_error(kind, "fit")
        n, error = test.mean_error(kind, "held out")
        if not n:
            n, error = test.mean_error(kind, "never fitted")
        verdict = "met" if error <= GOAL else "**not met**"
        shown = f"{fit_n} | {fit_error:.1%}" if fit_n else "0 | "
        lines.append(f"| {kind} | {shown} | {n} | {error:.1%} | {verdict} |")
    return "\n".join(lines)


def rows_table(results: Iterable[Result]) -> str:
    lines = [
        "| kind | context | users | published | predicted | error | half | note |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        row = r.row
        lines.append(
            f"| {row.kind} | {row.context} | {row.concurrency} | {row.tok_s:g} | {r.predicted:.1f} | {r.error:+.0%} "
            f"| {row.half} | {row.note} |"
        )
    return "\n".join(lines)


def parameters(test: BackTest) -> str:
    lines = []
    for family, chance in test.acceptance.items():
        c = test.calibrations[family]
        shares = ", ".join(f"{e:.2f} at {m:g}" for m, e in c.moe_efficiency)
        lines.append(
            f"- {family}: {c.layer_overhead_s * 1e6:.0f} µs per layer, experts read at {shares} tokens (share of "
            f"datasheet bandwidth), KV at {c.kv_efficiency:.2f}, a drafted token is kept with chance {chance:.2f}."
        )
    c = test.calibrations["reference"]
    lines.append(
        f"- reference: kernel times x{c.kernel_scale:.2f} of the H200's, all-reduce x{c.allreduce_scale:.2f} of "
        f"135 µs, "
        f"{c.eager_layer_s * 1e6:.0f} µs of host time per layer without graphs."
    )
    return "\n".join(lines)


def sections(test: BackTest) -> dict[str, str]:
    return {
        "summary": summary(test),
        "parameters": parameters(test),
        "reference": rows_table(test.reference),
        "reference-unfitted": rows_table(test.unfitted_reference),
        "published": rows_table(test.results),
    }


def fill(page: str, tables: dict[str, str]) -> str:
    """`page` with each `<!-- table NAME -->...<!-- end -->` replaced."""
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert marks.search(page), f"docs/planning.md lacks the mark of table {name}"
        page = marks.sub(lambda m, table=table: f"{m.group(1)}{table}\n{m.group(2)}", page)  # type: ignore[misc]
    return page


def stored_form(test: BackTest) -> str:
    """calibration.json."""
    tree = {
        "format": "glm5-calibration/1",
        "acceptance": {k: round(v, 4) for k, v in test.acceptance.items()},
        "calibrations": {k: _rounded(asdict(c)) for k, c in test.calibrations.items()},
    }
    return json.dumps(tree, indent=1) + "\n"


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def main(arguments: Sequence[str]) -> None:
    import sys

    test = run()
    for name, table in sections(test).items():
        sys.stdout.write(f"\n{name}\n{table}\n")
    if "--write" in arguments:
        FILE.write_text(stored_form(test))
        page = Path(__file__).parents[2] / "docs" / "planning.md"
        if page.is_file():
            page.write_text(fill(page.read_text(), sections(test)))


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
