"""Generated files are as they would be made, from profiles and dashboards; drift is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from k8s import render
from k8s.cli import app
from k8s.overlay import overlay
from service.config import PROFILES, load, parse
from service.errors import UserError

ROOT = Path(__file__).resolve().parents[3]


def test_nothing_has_drifted() -> None:
    assert render.drift() == [], "run: glm5 k8s render --write"


def test_drift_is_seen_and_written_away(tmp_path: Path) -> None:
    files = {tmp_path / "a.yaml": "a: 1\n", tmp_path / "b.env": "B=1\n"}
    assert render.write(files) == sorted(files)
    assert render.write(files) == [] and render.drift(files) == []
    (tmp_path / "a.yaml").write_text("a: 2\n")
    (tmp_path / "old.yaml").write_text("left over\n")
    difference = "\n".join(render.drift(files))
    assert "-a: 2" in difference and "+a: 1" in difference and "-left over" in difference
    assert render.write(files) == [tmp_path / "a.yaml", tmp_path / "old.yaml"]
    assert sorted(tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.name)
def test_args_of_the_serve_config_are_the_profile(profile: Path) -> None:
    tree = yaml.safe_load(render.serve_config_text(load(profile)))
    assert parse(tree["applications"][0]["args"]) == load(profile)
    assert tree["applications"][0]["import_path"] == "deployments.app:build"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_application_is_the_one_that_glm5_serve_starts() -> None:
    from deployments import app as application
    from deployments import autoscaling, declarative

    assert (declarative.NAME, declarative.IMPORT_PATH) == (application.NAME, application.BUILDER)
    assert declarative.POLICY_PATH == autoscaling.PATH


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_profile_that_scales_brings_its_policy() -> None:
    from deployments import autoscaling, declarative

    fixed, scaling = load(overrides=[]), load(overrides=["pools.shared.max_replicas=3"])
    assert "autoscaling_policy" not in declarative.serve_config(fixed)["applications"][0]
    tree = declarative.serve_config(scaling)
    policy = tree["applications"][0]["autoscaling_policy"]
    assert declarative.faults(tree) == []
    as_served = autoscaling.schema(scaling, declarative.NAME, declarative.IMPORT_PATH)["autoscaling_policy"]
    assert policy["policy_function"] == as_served["policy_function"]
    assert parse(policy["policy_kwargs"]["config"]) == parse(as_served["policy_kwargs"]["config"]) == scaling


def test_the_environment_is_rays_for_the_profile_and_fails_closed() -> None:
    env = render.ray_env(overlay("one-box").config())
    assert env["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN_PATH" not in env
    assert env["OMP_NUM_THREADS"] == "16", "the replica's CPUs, not those of the machine that renders"
    assert env["RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"] == "0"


def test_relabelling_is_that_of_the_dashboards_in_the_operators_spelling() -> None:
    rules = yaml.safe_load((ROOT / "dashboards" / "relabel.yml").read_text())
    made = {item["metadata"]["name"]: item for item in render.scrapes(rules)}
    service = made["glm5-service"]["spec"]
    assert [rule["regex"] for rule in service["metricRelabelings"]] == [rule["regex"] for rule in rules]
    keys = {key for rule in service["metricRelabelings"] for key in rule}
    assert keys == {"sourceLabels", "regex", "targetLabel", "replacement"}
    # The service is scraped once, at its Service's address; what Ray's agents bring of it is dropped.
    assert [source["role"] for source in service["kubernetesSDConfigs"]] == ["Service"]
    assert made["glm5-ray"]["spec"]["podMetricsEndpoints"][0]["metricRelabelings"][-1]["action"] == "drop"


def test_alerts_and_dashboards_are_carried_whole(tmp_path: Path) -> None:
    files = {path.name: text for path, text in render.monitoring().items()}
    alerts = yaml.safe_load((ROOT / "dashboards" / "alerts.yml").read_text())
    assert yaml.safe_load(files["rules.yaml"])["spec"] == alerts
    for board in (ROOT / "dashboards" / "out").glob("*.json"):
        assert json.loads(files[board.name]) == json.loads(board.read_text())
        assert len(files[board.name]) < 1_000_000, "a ConfigMap holds 1 MiB"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_a_profile_with_changes() -> None:
    done = run("render", str(PROFILES / "one-box-8gpu.yaml"), "--set", "pools.shared.slots=8", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["applications"][0]["args"]["pools"]["shared"]["slots"] == 8


def test_the_command_checks_drift() -> None:
    assert run("render", "--check").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("render",), ("render", "--write", "--check"), ("render", "--check", "--set", "a=1")]
)
def test_the_command_refuses_half_a_question(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, UserError)


def test_help_teaches() -> None:
    for command in ("render", "check", "model"):
        text = CliRunner().invoke(app, [command, "--help"]).output
        assert "Usage" in text and len(text) > 300
    assert typer.main.get_command(app) is not None
