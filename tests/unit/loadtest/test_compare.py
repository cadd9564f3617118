"""Statistics, comparison, gates, plots and storage on runs made by hand."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from loadtest import compare, gate, plot, stats, store
from loadtest.metrics import Measured, spread_of
from loadtest.quantity import names, quantity
from loadtest.verdict import LevelSummary
from service.errors import UserError


@pytest.mark.parametrize(
    ("p", "freedom", "t"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.975, 10, 2.228),
        (0.95, 30, 1.697),
        (0.975, 1e6, 1.960),
    ],
)
def test_t_quantiles_of_the_printed_tables(p: float, freedom: float, t: float) -> None:
    assert stats.t_quantile(p, freedom) == pytest.approx(t, abs=6e-4)


def test_welch_by_hand() -> None:
    before, after = [100.0, 102.0, 98.0], [200.0, 220.0, 210.0]
    ratio = stats.ratio(before, after)
    x, y = [math.log(v) for v in before], [math.log(v) for v in after]
    vx, vy = (sum((v - sum(z) / 3) ** 2 for v in z) / 2 / 3 for z in (x, y))
    freedom = (vx + vy) ** 2 / (vx**2 / 2 + vy**2 / 2)
    half = stats.t_quantile(0.975, freedom) * math.sqrt(vx + vy)
    assert ratio.low == pytest.approx(ratio.value * math.exp(-half))
    assert ratio.high == pytest.approx(ratio.value * math.exp(half))
    assert ratio.verdict == "higher"
    assert stats.ratio(after, before).verdict == "lower"
    assert stats.ratio(before, [101.0, 97.0, 103.0]).verdict == "within noise"
    assert stats.ratio(before[:2], after).verdict == "unknown"


def test_interval_covers_the_truth_about_95_times_of_100() -> None:
    rng = random.Random(4)
    hits = 0
    for _ in range(400):
        before = [100 * math.exp(rng.gauss(0, 0.05)) for _ in range(3)]
        after = [150 * math.exp(rng.gauss(0, 0.10)) for _ in range(4)]
        ratio = stats.ratio(before, after)
        assert ratio.low and ratio.high
        hits += ratio.low <= 1.5 <= ratio.high
    assert 0.92 <= hits / 400 <= 0.99


def level(concurrency: int, repeat: int, speed: float, started: float, **changes: object) -> LevelSummary:
    ttft = spread_of([10 / speed])
    measured = Measured(
        sent=10,
        ok=10,
        failed=0,
        cancelled=0,
        window_s=5.0,
        output_tok_s=speed,
        ttft=ttft,
        per_user_tok_s=spread_of([speed]),
    )
    return LevelSummary(**{  # type: ignore[arg-type]
        "index": repeat, "repeat": repeat, "concurrency": concurrency, "rate": 0.0, "started_at": started,
        "measured": measured,
    } | changes)  # fmt: skip


def make(path: Path, speeds: dict[int, list[float]], start: float = 0.0, **changes: object) -> store.Run:
    run = store.create(path, {"label": path.name, "gpus": 0, "machine": {}, "options": {}})
    for concurrency, values in speeds.items():
        for repeat, speed in enumerate(values):
            store.add(run, level(concurrency, repeat, speed, start + repeat * 10, **changes), [], 0.0)
    return run


EAGER = {1: [20.0, 20.2, 19.9], 10: [154.0, 150.0, 158.0], 1024: [1049.0, 1060.0, 1040.0]}
GRAPH = {1: [42.7, 42.5, 43.0], 10: [128.7, 127.0, 131.0], 1024: [1060.0, 1035.0, 1055.0]}


def test_the_table(tmp_path: Path) -> None:
    make(tmp_path / "eager", EAGER)
    make(tmp_path / "graph", GRAPH, start=5.0)
    runs = store.load(tmp_path / "eager"), store.load(tmp_path / "graph")
    result = compare.compare(*runs, quantity("output_tok_s"))
    rows = compare.rows(result)
    assert rows[0] == ["Concurrency", "eager, tok/s", "graph, tok/s", "Improvement"]
    assert rows[1][:3] == ["1", "20.0", "42.7"]
    assert "2.13x" in rows[1][3]
    assert rows[2][3].startswith("-16.")
    assert rows[3][3].startswith("within noise [0.9")
    assert result.warnings == ()
    assert [x["improvement"]["verdict"] for x in compare.to_json(result)["levels"]] == [
        "higher",
        "lower",
        "within noise",
    ]
    waits = compare.compare(*runs, quantity("ttft.p95"))
    assert waits.lines[0].ratio.value == pytest.approx(result.lines[0].ratio.value)  # shorter waits are better
    compare.save(result, tmp_path)
    assert "| 1 | 20.0 | 42.7 |" in (tmp_path / "compare.md").read_text()


def test_warnings(tmp_path: Path) -> None:
    before = make(tmp_path / "a", EAGER)
    later = make(tmp_path / "b", GRAPH, start=1000.0)
    assert any("not interleaved" in w for w in compare.compare(before, later, quantity("output_tok_s")).warnings)
    single = make(tmp_path / "c", {1: [42.0]})
    result = compare.compare(before, single, quantity("output_tok_s"))
    assert any("fewer than 3" in w for w in result.warnings)
    assert compare.rows(result)[1][3] == "+109.7% (2.10x)"
    invalid = make(tmp_path / "d", GRAPH, reasons=("client saturated",))
    assert compare.compare(before, invalid, quantity("output_tok_s")).lines == ()
    other = make(tmp_path / "e", {7: [1.0]})
    with pytest.raises(UserError, match="no level in common"):
        compare.compare(before, other, quantity("output_tok_s"))


def test_every_quantity_can_be_asked_of_a_level() -> None:
    for name in names():
        quantity(name).of(level(1, 0, 5.0, 0.0))
    assert quantity("ttft.p95").of(level(1, 0, 5.0, 0.0)) == pytest.approx(2000.0)
    with pytest.raises(UserError, match=r"did you mean .*ttft\.p95"):
        quantity("ttft.p96")


def gates(tmp_path: Path, text: str) -> gate.Gates:
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    return gate.load(path)


def test_gates(tmp_path: Path) -> None:
    run = make(tmp_path / "r", EAGER)
    rules = "gates: [{metric: output_tok_s, at: [1, 10], min: 20}, {metric: ttft.p95, at: 1024, max: 9.6}]"
    assert all(finding.ok for finding in gate.check(run, gates(tmp_path, rules)))
    strict = gates(tmp_path, "gates: [{metric: output_tok_s, min: 100}, {metric: output_tok_s, at: 64, min: 1}]")
    findings = gate.check(run, strict)
    assert [finding.ok for finding in findings] == [False, True, True, False]
    assert findings[0].text == "output_tok_s at 1 is 20 tok/s, below the minimum of 100"
    assert "not measured" in findings[3].text
    slow = make(tmp_path / "s", {1: [10 / 23.65]})
    findings = gate.check(slow, gates(tmp_path, "gates: [{metric: ttft.p95, max: 20}]"))
    assert findings[0].text == "ttft.p95 at 1 is 23650.0 ms, above the maximum of 20"
    run.interrupted = True
    assert not all(finding.ok for finding in gate.check(run, gates(tmp_path, rules)))
    invalid = make(tmp_path / "i", {1: [20.0]}, reasons=("client saturated",))
    findings = gate.check(invalid, gates(tmp_path, "gates: [{metric: output_tok_s, min: 1}]"))
    assert [finding.ok for finding in findings] == [False, True]
    allowed = "allow_invalid: true\ngates: [{metric: output_tok_s, min: 1}]"
    assert all(finding.ok for finding in gate.check(invalid, gates(tmp_path, allowed)))


def test_failed_requests_fail_the_gate(tmp_path: Path) -> None:
    m = Measured(sent=10, ok=8, failed=2, cancelled=0, errors={"http_503": 2}, window_s=5.0, output_tok_s=50.0)
    run = make(tmp_path / "r", {1: [1.0]}, measured=m)
    rule = "gates: [{metric: output_tok_s, min: 1}]\n"
    findings = gate.check(run, gates(tmp_path, rule))
    assert "2 of 10 requests failed (2 http_503)" in findings[0].text
    assert all(f.ok for f in gate.check(run, gates(tmp_path, rule + "max_failed_share: 0.2")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gates: []", "needs a list"),
        ("gates: [{metric: output_tok_s}]", "gate 1 needs `min` or `max`"),
        ("gates: [{metric: output_toks, min: 1}]", "did you mean output_tok_s"),
        ("gates: [{metric: output_tok_s, mim: 1, max: 2}]", "unknown key 'mim'"),
        ("gates: [{metric: output_tok_s, min: fast}]", "not a number"),
        ("gates: [{metric: output_tok_s, min: 1, at: all}]", "`at` must be"),
        ("max_failed_share: 2\ngates: [{metric: output_tok_s, min: 1}]", "must lie in 0..1"),
        ("gates: [", "is not YAML"),
    ],
)
def test_bad_gates(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("[", r"\[")):
        gates(tmp_path, text)


def test_store_returns_what_was_stored(tmp_path: Path) -> None:
    run = make(tmp_path / "r", EAGER)
    again = store.load(tmp_path / "r")
    assert again.levels == run.levels
    with pytest.raises(UserError, match="already holds a run"):
        store.create(tmp_path / "r", {})
    with pytest.raises(UserError, match="is no run"):
        store.load(tmp_path)


def test_plots(tmp_path: Path) -> None:
    runs = [make(tmp_path / "eager", EAGER), make(tmp_path / "graph", GRAPH)]
    plot.plot(runs, tmp_path / "p.svg", "title")
    plot.plot(runs, tmp_path / "p.png")
    first = (tmp_path / "p.svg").read_text()
    assert first.lstrip().startswith("<?xml")
    assert "path" in first
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    plot.plot(runs, tmp_path / "p.svg", "title")
    assert (tmp_path / "p.svg").read_text() == first  # the same run, the same file
    with pytest.raises(UserError, match="must end in"):
        plot.plot(runs, tmp_path / "p.jpeg")
