"""Which metrics exist, with their labels: ours from declarations or a scrape, others from lists with a source.

`known/vllm.txt` is read out of vLLM's source by `from_vllm_source` (a test compares), `known/dcgm.txt` names its
origin, `known/llamacpp.txt` comes from a live scrape of llama.cpp (the end-to-end test compares).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

KNOWN = Path(__file__).resolve().parent / "known"
SCRAPE_LABELS = frozenset({"job", "instance", "replica"})
"""What Prometheus itself and our merging of native text add."""


@dataclass(frozen=True)
class Known:
    """A sample name that exists. `labels`: names it carries, None where not known. `bounds`: values of `le`."""

    labels: frozenset[str] | None = None
    bounds: frozenset[str] = frozenset()


def from_exposition(text: str) -> dict[str, Known]:
    """From Prometheus text, such as a live scrape of /metrics. Families without a sample count by their TYPE line."""
    from prometheus_client.parser import text_string_to_metric_families

    labels: dict[str, set[str]] = {}
    bounds: dict[str, set[str]] = {}
    bare: dict[str, Known] = {}
    for family in text_string_to_metric_families(text):
        for name in _sample_names(family.name, family.type):
            bare[name] = Known()
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
            if "le" in sample.labels:
                bounds.setdefault(sample.name, set()).add(sample.labels["le"])
    found = {name: Known(frozenset(names), frozenset(bounds.get(name, ()))) for name, names in labels.items()}
    return bare | found


def ours() -> dict[str, Known]:
    """Of this code, without a running service."""
    from service.metrics.declared import Metrics

    metrics = Metrics()
    found: dict[str, Known] = {}
    for metric in vars(metrics).values():
        names = getattr(metric, "_labelnames", None)
        if names is None:
            continue
        for family in metric.describe():
            bounds = frozenset((*(str(float(b)) for b in metrics.bounds.get(family.name, ())), "+Inf"))
            for name in _sample_names(family.name, family.type):
                bucket = name.endswith("_bucket")
                found[name] = Known(
                    frozenset((*names, "le")) if bucket else frozenset(names), bounds if bucket else frozenset()
                )
    return found


def listed(path: Path) -> dict[str, Known]:
    """From a list in known/: `name type` a line."""
    lines = (
        line.split() for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    )
    # DCGM's counters have no `_total`, so only histograms get other sample names here.
    return {name: Known() for line in lines for name in _histogram_names(line[0], line[1])}


def recorded(rules: Mapping[str, object]) -> dict[str, Known]:
    """Names that recording rules of a Prometheus rule file define."""
    groups: Iterable[Mapping[str, object]] = rules["groups"]  # type: ignore[assignment]
    return {str(rule["record"]): Known() for group in groups for rule in group["rules"] if "record" in rule}  # type: ignore[attr-defined]


def everything(rules: Mapping[str, object]) -> dict[str, Known]:
    """All names that a panel or alert may use, without a live scrape."""
    lists = (listed(KNOWN / f"{name}.txt") for name in ("vllm", "dcgm", "llamacpp"))
    return {name: known for found in (*lists, recorded(rules), ours()) for name, known in found.items()}


def from_vllm_source(package: Path) -> list[str]:
    """Lines of known/vllm.txt: every metric that vLLM's core registers, from the syntax tree of its source."""
    found: set[str] = set()
    for path in (*sorted((package / "v1" / "metrics").glob("*.py")), package / "v1" / "spec_decode" / "metrics.py"):
        for name, kind in _registered(ast.parse(path.read_text(encoding="utf-8"))):
            counter = kind == "counter" and not name.endswith("_total")
            found.add(f"{name}_total counter" if counter else f"{name} {kind}")
    return sorted(found)


def _registered(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            kind = called.lower().strip("_").removesuffix("_cls")
            for word in node.keywords:
                if word.arg == "name" and kind in ("gauge", "counter", "histogram") and _is_name(word.value):
                    yield word.value.value, kind  # type: ignore[attr-defined]
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "counter_specs":
            for item in node.value.elts:  # type: ignore[attr-defined]
                yield item.elts[0].value, "counter"


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("vllm:")


def _sample_names(family: str, kind: str) -> tuple[str, ...]:
    return (f"{family}_total",) if kind == "counter" else _histogram_names(family, kind)


def _histogram_names(family: str, kind: str) -> tuple[str, ...]:
    return (f"{family}_bucket", f"{family}_sum", f"{family}_count") if kind == "histogram" else (family,)
