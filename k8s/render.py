"""Files that are made, never written: Serve configs from profiles, monitoring from dashboards/."""

from __future__ import annotations

import difflib
import json
import textwrap
from pathlib import Path
from typing import Any

import yaml

from deployments.cluster import environment
from deployments.declarative import serve_config
from k8s.overlay import HERE, Overlay, overlays
from service.config import Config

DASHBOARDS = HERE.parent / "dashboards"
MONITORING = HERE / "components" / "monitoring" / "generated"
NOTE = "# Made by `glm5 k8s render --write`; changes here are lost and fail the tests.\n"
SCRAPE_S = 15
NAMESPACE = "glm5-serve"


def serve_config_text(config: Config) -> str:
    """`serveConfigV2` of a profile, as YAML."""
    return yaml.safe_dump(serve_config(config), sort_keys=False, width=120)


def ray_env(config: Config) -> dict[str, str]:
    """Environment of every Ray container: Ray's and Serve's settings for this profile."""
    flags = environment(config, None)
    # The machine that renders is not the one that runs: the replicas' share of CPUs instead of the cores counted here.
    flags["OMP_NUM_THREADS"] = str(max(1, int(max(pool.cpus for pool in config.pools.values()))))
    # Belongs to authOptions, which an old operator would drop without a word: Ray then refuses to start, instead of
    # starting without authentication.
    flags["RAY_AUTH_MODE"] = "token"
    return flags


def _patch(config: Config) -> str:
    head = "apiVersion: ray.io/v1\nkind: RayService\nmetadata:\n  name: glm5\nspec:\n  serveConfigV2: |\n"
    return NOTE + head + textwrap.indent(serve_config_text(config), "    ")


def _env_file(flags: dict[str, str]) -> str:
    return NOTE + "".join(f"{name}={value}\n" for name, value in sorted(flags.items()))


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)


def relabelings(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prometheus' own spelling of relabel rules -> the Prometheus operator's."""
    return [{_camel(key): value for key, value in rule.items()} for rule in rules]


def scrapes(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Two: the service's own metrics from the address of its Service, behind which any ingress speaks for the whole
    service, and Ray's agents, of which each speaks for its node; ours come through these too and are dropped."""
    metric_rules = relabelings(rules)
    labels = {"app.kubernetes.io/name": "glm5-serve"}
    ours = {"sourceLabels": ["__name__"], "regex": "glm_.+", "action": "drop"}
    interval, timeout = f"{SCRAPE_S}s", f"{SCRAPE_S - 5}s"
    service = {
        "apiVersion": "monitoring.coreos.com/v1alpha1",
        "kind": "ScrapeConfig",
        "metadata": {"name": "glm5-service", "labels": labels},
        "spec": {
            "kubernetesSDConfigs": [
                {
                    # A target for each Service, by its own address. KubeRay labels those that serve, and makes one for
                    # each cluster during an incremental upgrade: two then, and both sums are right.
                    "role": "Service",
                    "namespaces": {"names": [NAMESPACE]},
                    "selectors": [{"role": "Service", "label": "ray.io/serve"}],
                }
            ],
            "relabelings": [
                {"sourceLabels": ["__meta_kubernetes_service_port_name"], "regex": "serve", "action": "keep"}
            ],
            "metricsPath": "/metrics",
            "scrapeInterval": interval,
            "scrapeTimeout": timeout,
            "metricRelabelings": metric_rules,
        },
    }
    ray = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": "glm5-ray", "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"glm5-serve/ray": "yes"}},
            "podTargetLabels": ["ray.io/cluster", "ray.io/node-type"],
            "podMetricsEndpoints": [
                {
                    "port": "metrics",
                    "path": "/metrics",
                    "interval": interval,
                    "scrapeTimeout": timeout,
                    "metricRelabelings": [*metric_rules, ours],
                }
            ],
        },
    }
    return [service, ray]


def prometheus_rule(alerts: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "glm5", "labels": {"app.kubernetes.io/name": "glm5-serve"}},
        "spec": alerts,
    }


def monitoring(dashboards: Path = DASHBOARDS) -> dict[Path, str]:
    """Files of the monitoring component."""
    rules = yaml.safe_load((dashboards / "relabel.yml").read_text(encoding="utf-8"))
    alerts = yaml.safe_load((dashboards / "alerts.yml").read_text(encoding="utf-8"))
    files = {
        MONITORING / "scrape.yaml": NOTE + yaml.safe_dump_all(scrapes(rules), sort_keys=False, width=120),
        MONITORING / "rules.yaml": NOTE + yaml.safe_dump(prometheus_rule(alerts), sort_keys=False, width=120),
    }
    for board in sorted((dashboards / "out").glob("*.json")):
        # Without spaces: a ConfigMap holds 1 MiB.
        text = json.dumps(json.loads(board.read_text(encoding="utf-8")), separators=(",", ":"), sort_keys=True)
        files[MONITORING / board.name] = text + "\n"
    return files


def of_overlay(overlay: Overlay) -> dict[Path, str]:
    config = overlay.config()
    folder = overlay.folder / "generated"
    return {folder / "serve-config.yaml": _patch(config), folder / "ray.env": _env_file(ray_env(config))}


def everything() -> dict[Path, str]:
    """Every made file -> its text."""
    files = monitoring()
    for overlay in overlays():
        files |= of_overlay(overlay)
    return files


def drift(files: dict[Path, str] | None = None) -> list[str]:
    """Differences between the files and what they are made from; files that nobody makes any more count."""
    wanted = everything() if files is None else files
    folders = {path.parent for path in wanted}
    there = {path for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_file()}
    found: list[str] = []
    for path in sorted({*wanted, *there}):
        now = path.read_text(encoding="utf-8") if path.is_file() else ""
        name = str(path.relative_to(HERE)) if path.is_relative_to(HERE) else str(path)
        found += difflib.unified_diff(
            now.splitlines(), wanted.get(path, "").splitlines(), f"{name} as it is", f"{name} as made", lineterm="", n=1
        )
    return found


def write(files: dict[Path, str] | None = None) -> list[Path]:
    """Write what differs, remove what nobody makes. Returns the paths that changed."""
    wanted = everything() if files is None else files
    changed = []
    for folder in {path.parent for path in wanted}:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.is_file() and path not in wanted:
                path.unlink()
                changed.append(path)
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return sorted(changed)
