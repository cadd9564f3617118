"""Dashboards into a Grafana: folder, data source and dashboards made or brought up to date, and nothing touched twice.

What Grafana keeps is compared field by field with what we want; its own additions (ids, versions, defaults) do not
count as a difference. `plan` only reads, `apply` does what a plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from service.errors import UserError

FOLDER_UID, FOLDER_TITLE = "glm5-serve", "GLM-5"
SOURCE_UID, SOURCE_NAME = "glm5-prometheus", "GLM-5 Prometheus"
TIMEOUT_S = 15.0

Kind = Literal["folder", "datasource", "dashboard"]
Verb = Literal["create", "update", "keep"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """One thing in Grafana, and what is to be done about it. `changes`: one line for each field that differs."""

    kind: Kind
    uid: str
    title: str
    verb: Verb
    changes: tuple[str, ...]
    body: Mapping[str, Any]


class Grafana:
    """A Grafana over HTTP, through grafana-client. Every fault that a user can mend becomes a UserError."""

    def __init__(self, url: str, token: str) -> None:
        try:
            from grafana_client import GrafanaApi, TokenAuth
        except ImportError:
            raise UserError("grafana-client is not installed; docs/metrics.md (Grafana) says how") from None
        self._url = url
        self._api = GrafanaApi.from_url(url, credential=TokenAuth(token), timeout=TIMEOUT_S)

    def plan(self, dashboards: Mapping[str, Mapping[str, Any]], prometheus: str | None) -> list[Step]:
        """What has to change. `dashboards`: uid -> JSON model; `prometheus`: URL of the data source, None for none."""
        folder = self._find(lambda: self._api.folder.get_folder(FOLDER_UID))
        steps = [_step("folder", FOLDER_UID, FOLDER_TITLE, {"title": FOLDER_TITLE}, folder)]
        if prometheus is not None:
            source = self._find(lambda: self._api.datasource.get_datasource_by_uid(SOURCE_UID))
            wanted = {"name": SOURCE_NAME, "type": "prometheus", "url": prometheus, "access": "proxy"}
            steps.append(_step("datasource", SOURCE_UID, SOURCE_NAME, wanted, source))
        for uid, model in dashboards.items():
            found = self._find(lambda uid=uid: self._api.dashboard.get_dashboard(uid))  # type: ignore[misc]
            there = None if found is None else found["dashboard"]
            step = _step("dashboard", uid, str(model["title"]), model, there)
            if found is not None and (now := found["meta"].get("folderUid", "")) != FOLDER_UID:
                changes = (*step.changes, f"folder: {now or 'General'!r} -> {FOLDER_UID!r}")
                step = Step("dashboard", uid, step.title, "update", changes, model)
            steps.append(step)
        return steps

    def apply(self, steps: list[Step]) -> None:
        """Do what `plan` found. Steps that say `keep` write nothing."""
        for step in steps:
            if step.verb != "keep":
                self._ask(lambda step=step: self._write(step))  # type: ignore[misc]

    def _write(self, step: Step) -> None:
        create = step.verb == "create"
        if step.kind == "folder":
            if create:
                self._api.folder.create_folder(step.title, step.uid)
            else:
                self._api.folder.update_folder(step.uid, title=step.title, overwrite=True)
        elif step.kind == "datasource":
            body = {**step.body, "uid": step.uid}
            if create:
                self._api.datasource.create_datasource(body)
            else:
                self._api.datasource.update_datasource_by_uid(step.uid, body)
        else:
            body = {"dashboard": {**step.body, "id": None}, "folderUid": FOLDER_UID, "overwrite": True}
            self._api.dashboard.update_dashboard({**body, "message": "glm5 dashboards push"})

    def _find(self, call: Callable[[], Result]) -> Result | None:
        """The answer, or None where Grafana has no such thing."""
        from grafana_client.client import GrafanaClientError

        def found() -> Result | None:
            try:
                return call()
            except GrafanaClientError as fault:
                if fault.status_code == 404:
                    return None
                raise

        return self._ask(found)

    def _ask(self, call: Callable[[], Result]) -> Result:
        from grafana_client.client import GrafanaException

        try:
            return call()
        except GrafanaException as fault:
            hint = " (is the token right, and may it write?)" if fault.status_code in (401, 403) else ""
            raise UserError(f"Grafana at {self._url} answered {fault.status_code}: {fault.message}{hint}") from None
        except OSError as fault:  # the HTTP client's errors are OSErrors
            raise UserError(f"Grafana at {self._url} cannot be reached: {type(fault).__name__}") from None


def differences(wanted: Any, there: Any, path: str = "") -> Iterator[str]:
    """Where `there` lacks or contradicts `wanted`; keys that only Grafana has are its own business."""
    if isinstance(wanted, Mapping) and isinstance(there, Mapping):
        for key, value in wanted.items():
            at = f"{path}.{key}" if path else str(key)
            if key not in there:
                if value not in (None, [], {}, ""):
                    yield f"{at}: missing"
            else:
                yield from differences(value, there[key], at)
    elif isinstance(wanted, list) and isinstance(there, list):
        if len(wanted) != len(there):
            yield f"{path}: {len(there)} entries -> {len(wanted)}"
        for index, (a, b) in enumerate(zip(wanted, there, strict=False)):
            yield from differences(a, b, f"{path}[{index}]")
    elif wanted != there:
        yield f"{path}: {_short(there)} -> {_short(wanted)}"


def _step(kind: Kind, uid: str, title: str, wanted: Mapping[str, Any], there: Any) -> Step:
    if there is None:
        return Step(kind, uid, title, "create", (), wanted)
    changes = tuple(differences(wanted, there))
    return Step(kind, uid, title, "update" if changes else "keep", changes, wanted)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
