"""`glm5 dashboards push` against a small Grafana."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dashboards.cli import TOKEN_VARIABLE, app
from dashboards.push import FOLDER_UID, SOURCE_UID, differences
from service.errors import UserError
from tests.unit.dashboards.fake_grafana import Store, fake_grafana

pytest.importorskip("grafana_client")
pytest.importorskip("grafana_foundation_sdk")
PROMETHEUS = ("--prometheus", "http://prometheus:9090")


@pytest.fixture
def grafana() -> Iterator[tuple[str, Store]]:
    with fake_grafana() as there:
        yield there


def push(url: str, *more: str, token: str = "editor") -> list[dict[str, object]]:
    result = CliRunner(env={TOKEN_VARIABLE: token}).invoke(app, ["push", "--grafana", url, "--json", *more])
    if result.exception is not None:
        raise result.exception
    steps: list[dict[str, object]] = json.loads(result.stdout)["steps"]
    return steps


def verbs(steps: list[dict[str, object]]) -> list[object]:
    return [step["verb"] for step in steps]


def test_a_first_push_makes_everything_and_a_second_touches_nothing(grafana: tuple[str, Store]) -> None:
    url, store = grafana
    assert verbs(push(url, *PROMETHEUS)) == ["create"] * 4
    assert set(store.dashboards) == {"glm5-serving", "glm5-gpu-box"}
    assert all(saved["meta"]["folderUid"] == FOLDER_UID for saved in store.dashboards.values())
    assert store.sources[SOURCE_UID]["url"] == "http://prometheus:9090"
    assert len(store.dashboards["glm5-serving"]["dashboard"]["panels"]) > 30
    store.writes.clear()
    assert verbs(push(url, *PROMETHEUS)) == ["keep"] * 4
    assert store.writes == []


def test_what_somebody_changed_is_named_and_put_right(grafana: tuple[str, Store]) -> None:
    url, store = grafana
    push(url, *PROMETHEUS)
    model = store.dashboards["glm5-serving"]["dashboard"]
    panel = next(panel for panel in model["panels"] if panel["title"] == "Output tok/s")
    panel["targets"][0]["expr"] = "vector(1)"
    store.dashboards["glm5-gpu-box"]["meta"]["folderUid"] = ""
    store.sources[SOURCE_UID]["url"] = "http://elsewhere"
    steps = push(url, *PROMETHEUS, "--dry-run")
    assert verbs(steps) == ["keep", "update", "update", "update"]
    assert panel["targets"][0]["expr"] == "vector(1)"  # a dry run changes nothing
    changes = [line for step in steps for line in step["changes"]]  # type: ignore[attr-defined]
    assert any("vector(1)" in line and "targets[0].expr" in line for line in changes)
    assert "url: 'http://elsewhere' -> 'http://prometheus:9090'" in changes
    assert f"folder: 'General' -> {FOLDER_UID!r}" in changes
    push(url, *PROMETHEUS)
    assert verbs(push(url, *PROMETHEUS)) == ["keep"] * 4
    assert store.dashboards["glm5-serving"]["dashboard"]["version"] == 2


def test_a_dry_run_on_an_empty_grafana_writes_nothing(grafana: tuple[str, Store]) -> None:
    url, store = grafana
    assert verbs(push(url, "--dry-run")) == ["create"] * 3
    assert store.writes == []
    assert not store.folders


def test_without_prometheus_no_data_source_is_touched(grafana: tuple[str, Store]) -> None:
    url, store = grafana
    push(url)
    assert not store.sources


@pytest.mark.parametrize(("token", "status"), [("nobody", "401"), ("viewer", "403")])
def test_a_wrong_token_is_one_sentence(grafana: tuple[str, Store], token: str, status: str) -> None:
    with pytest.raises(UserError, match=f"answered {status}.*is the token right"):
        push(grafana[0], token=token)


def test_no_grafana_is_one_sentence() -> None:
    with pytest.raises(UserError, match="cannot be reached"):
        push("http://127.0.0.1:9")


def test_the_token_comes_from_a_file_and_never_from_nowhere(grafana: tuple[str, Store], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("editor\n")
    assert verbs(push(grafana[0], "--token-file", str(file), token="")) == ["create"] * 3
    with pytest.raises(UserError, match="holds no token"):
        push(grafana[0], token="")
    with pytest.raises(UserError, match="No such file"):
        push(grafana[0], "--token-file", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="http://"):
        push("grafana:3000")


def test_differences_ignore_what_only_grafana_has() -> None:
    assert list(differences({"a": 1, "b": [{"c": 2}]}, {"a": 1, "b": [{"c": 2, "id": 7}], "version": 3})) == []
    assert list(differences({"a": 1}, {"a": 2})) == ["a: 2 -> 1"]
    assert list(differences({"a": [1, 2]}, {"a": [1]})) == ["a: 1 entries -> 2"]
    assert list(differences({"a": 1, "n": None}, {})) == ["a: missing"]
