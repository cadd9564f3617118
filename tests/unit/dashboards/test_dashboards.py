"""Dashboards and alerts: built files are current, every name exists, every alert is proved both ways."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dashboards import build, check, promql
from dashboards.cli import app
from dashboards.known_names import KNOWN, Known, everything, from_exposition, from_vllm_source, ours
from service.metrics.declared import TTFT_S, Metrics
from service.metrics.exchange import merge, snapshot
from service.metrics.labels import OUTCOMES

ROOT = Path(__file__).resolve().parents[3]
CASES = sorted(Path(__file__).parent.glob("alerts*_test.yml"))
RULES = check.load_rules()
EXPRESSIONS = check.expressions(RULES)
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)


# ---------------------------------------------------------------- files


def test_built_files_are_as_the_code_says() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    assert build.drift() == []


def test_drift_is_seen_and_exits_1(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk")
    build.write(tmp_path)
    (tmp_path / "old.json").write_text("{}\n")
    path = tmp_path / "serving.json"
    path.write_text(path.read_text().replace("glm_itl_seconds", "glm_other_seconds", 1))
    result = CliRunner().invoke(app, ["build", "--check", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "glm_other_seconds" in result.stdout
    assert "old.json" in result.stdout
    assert CliRunner().invoke(app, ["build", "--out", str(tmp_path)]).exit_code == 0
    assert CliRunner().invoke(app, ["build", "--check", "--out", str(tmp_path)]).exit_code == 0


@pytest.mark.parametrize("path", sorted(build.OUT.glob("*.json")), ids=lambda path: path.name)
def test_a_dashboard_is_whole(path: Path) -> None:
    model = json.loads(path.read_text())
    panels = [panel for panel in model["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in model["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["expr"] and target["refId"] for target in panel["targets"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels overlap"


def test_every_metric_of_ours_is_shown_somewhere() -> None:
    """A figure that nobody can see is not worth its cost."""
    shown = {use.metric for expression in EXPRESSIONS for use in check.uses(expression.text)}
    families = {name: {name, f"{name}_bucket", f"{name}_sum", f"{name}_count"} for name in Metrics().schema}
    hidden = {name for name, names in families.items() if not names & shown}
    assert hidden == {"glm_requests_waiting"}  # engine-internal; `glm5 top` shows it


# ---------------------------------------------------------------- names


def test_every_name_exists() -> None:
    assert check.run() == []


def test_a_live_scrape_replaces_our_declarations() -> None:
    metrics = Metrics()
    text = merge([snapshot(metrics)]).decode()
    faults = check.run(text)
    # llama.cpp is not in this scrape: only its names may be missing, none of ours.
    llama = {f"there is no metric {name}" for name in everything(RULES) if name.startswith("llamacpp:")}
    assert {fault.what for fault in faults} <= llama
    assert faults


def test_declarations_and_exposition_agree() -> None:
    live = from_exposition(merge([snapshot(Metrics())]).decode())
    assert set(ours()) == {name for name in live if name != "glm_metrics_snapshots_ignored"}


USED = sorted({use.metric for expression in EXPRESSIONS for use in check.uses(expression.text)})


@pytest.mark.parametrize("name", USED)
def test_a_renamed_metric_fails(name: str) -> None:
    known = everything(RULES)
    known[f"{name}_renamed"] = known.pop(name)
    faults = check.check(known, EXPRESSIONS)
    assert faults and all(name in fault.what for fault in faults)


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ('sum(rate(glm_requests_total{outcom="ok"}[5m]))', "glm_requests_total has no label outcom"),
        ("sum by (teir) (glm_slots)", "no metric in it has the label teir"),
        ('rate(glm_ttft_seconds_bucket{le="2.1"}[5m])', "glm_ttft_seconds_bucket has no bucket le=2.1"),
        ("histogram_quantile(0.5, rate(glm_ttft_seconds[5m]))", "there is no metric glm_ttft_seconds"),
        ("glm_slots offset 7d and on (pool) nosuch", "there is no metric nosuch"),
        ("rate(vllm:generation_tokens[5m])", "there is no metric vllm:generation_tokens"),
    ],
)
def test_faults_are_found(expression: str, what: str) -> None:
    assert [fault.what for fault in check.check(everything(RULES), [check.Expression("here", expression)])] == [what]


def test_the_reader_of_promql() -> None:
    text = 'sum by (le) (rate(a:b_total{x="y{z}",job=~"$job"}[$__rate_interval] offset 7d)) / (c_d > 0) or vector(1e3)'
    assert list(check.uses(text)) == [check.Use("a:b_total", (("x", "y{z}"), ("job", "$job"))), check.Use("c_d", ())]
    assert check.grouping_labels(text) == {"le"}
    replaced = 'label_replace(x_y{z="nosuch{"}, "from", "$1", "concurrency", "([0-9]+).*")'
    assert list(check.uses(replaced)) == [check.Use("x_y", (("z", "nosuch{"),))]


def test_the_command_says_yes_and_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["check", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"expressions": len(EXPRESSIONS), "faults": []}
    monkeypatch.setattr(check, "expressions", lambda rules: [check.Expression("here", "nosuch")])
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 1
    assert "here: there is no metric nosuch" in result.stdout


def test_a_verdict_of_no_reaches_the_shell(tmp_path: Path) -> None:
    """Through the main command, which mounts this one."""
    pytest.importorskip("grafana_foundation_sdk")
    glm5 = Path(sys.executable).with_name("glm5")
    command = [str(glm5), "dashboards", "build", "--check", "--out", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1


def test_vllm_names_are_those_of_the_installed_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    lines = (KNOWN / "vllm.txt").read_text().splitlines()
    assert from_vllm_source(Path(spec.submodule_search_locations[0])) == [line for line in lines if line[0] != "#"]


def test_known_lists_do_not_shadow_ours() -> None:
    assert all(isinstance(known, Known) for known in everything(RULES).values())
    assert not {name for path in KNOWN.glob("*.txt") for name in path.read_text().split() if name.startswith("glm_")}


# ---------------------------------------------------------------- alerts


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    told = promtool("check", "rules", "--lint-fatal", str(check.ALERTS))
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_alerts_fire_and_do_not() -> None:
    told = promtool("test", "rules", str(CASES[0]))
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_the_comparison_with_last_week(tmp_path: Path) -> None:
    text = check.ALERTS.read_text()
    assert text.count(" offset 7d") == 2
    (tmp_path / "alerts_with_a_short_week.yml").write_text(text.replace(" offset 7d", " offset 6h"))
    shutil.copy(CASES[1], tmp_path)
    told = promtool("test", "rules", str(tmp_path / CASES[1].name))
    assert told.returncode == 0, told.stdout + told.stderr


@needs_promtool
def test_a_broken_alert_fails_its_cases(tmp_path: Path) -> None:
    """The cases can fail: the same ones against rules with one threshold moved."""
    text = check.ALERTS.read_text()
    assert "> 0.02" in text
    (tmp_path / "alerts.yml").write_text(text.replace("> 0.02", "> 0.2", 1))
    cases = yaml.safe_load(CASES[0].read_text())
    cases["rule_files"] = ["alerts.yml"]
    cases["tests"] = [case for case in cases["tests"] if "GlmErrorRatio" in case["name"]]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    told = promtool("test", "rules", str(tmp_path / "cases.yml"))
    assert told.returncode == 1
    assert "GlmErrorRatio" in told.stdout + told.stderr


def test_every_alert_has_cases_in_which_it_fires_and_does_not() -> None:
    """It fires for some series of a case; it does not for others of the same case, or at another time, or elsewhere."""
    fires: set[str] = set()
    quiet: set[str] = set()
    for path in CASES:
        for case in yaml.safe_load(path.read_text())["tests"]:
            selectors = {tuple(re.findall(r'(\w+)="([^"]*)"', series["series"])) for series in case["input_series"]}
            several = len(selectors) > 1
            for test in case["alert_rule_test"]:
                expected = test.get("exp_alerts") or []
                if expected:
                    fires.add(test["alertname"])
                    if several and ", not " in case["name"]:
                        quiet.add(test["alertname"])
                else:
                    quiet.add(test["alertname"])
    assert fires == set(ALERTS)
    assert quiet == set(ALERTS)


def test_every_alert_has_its_paragraph() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert headings == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_panels_and_alerts_measure_against_the_same_figures() -> None:
    text = check.ALERTS.read_text()
    assert promql.TTFT_BUDGET_S in TTFT_S
    assert set(re.findall(r'le="([\d.]+)"', text)) == {str(promql.TTFT_BUDGET_S)}
    assert f"14.4 * {1 - promql.TTFT_OBJECTIVE:.2f}" in text
    assert f"> {promql.ERROR_RATIO_LIMIT}" in ALERTS["GlmErrorRatio"]["expr"]
    assert re.search(r'outcome=~"([^"]*)"', text)[1] == "|".join(promql.ERROR_OUTCOMES)  # type: ignore[index]
    assert set(promql.ERROR_OUTCOMES) < set(OUTCOMES)


# ---------------------------------------------------------------- names through Ray


def relabel(name: str) -> str:
    """What Prometheus makes of a name under relabel.yml: rules in order, each regex anchored at both ends."""
    for rule in yaml.safe_load((ROOT / "dashboards" / "relabel.yml").read_text()):
        assert rule["source_labels"] == ["__name__"] == [rule["target_label"]]
        match = re.fullmatch(rule["regex"], name)
        if match:
            name = match.expand(rule["replacement"].replace("$", "\\"))
    return name


@pytest.mark.parametrize(
    ("name", "becomes"),
    [
        ("vllm:generation_tokens_total", "vllm:generation_tokens_total"),
        ("vllm_generation_tokens_total", "vllm:generation_tokens_total"),
        ("ray_vllm_generation_tokens_total", "vllm:generation_tokens_total"),
        ("ray_vllm_time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_bucket"),
        ("ray_glm_output_tokens_total", "glm_output_tokens_total"),
        ("ray_glm_slots", "glm_slots"),
        ("ray_glm_ttft_seconds_bucket_total", "glm_ttft_seconds_bucket"),
        ("ray_glm_ttft_seconds_count_total", "glm_ttft_seconds_count"),
        ("ray_glm_ttft_seconds_sum_total", "glm_ttft_seconds_sum"),
        ("ray_serve_num_ongoing_requests_at_replicas", "ray_serve_num_ongoing_requests_at_replicas"),
        ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_POWER_USAGE"),
        ("llamacpp:tokens_predicted_total", "llamacpp:tokens_predicted_total"),
    ],
)
def test_one_name_for_each_spelling(name: str, becomes: str) -> None:
    assert relabel(name) == becomes


def test_every_name_of_ours_comes_back_from_ray() -> None:
    for name in ours():
        through = f"ray_{name}" if name.endswith("_total") or name in Metrics().merging else f"ray_{name}_total"
        assert relabel(through) == name
