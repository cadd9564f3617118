"""The rules of the house that a machine can check: who imports whom, how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("service", "deployments", "loadtest", "dashboards", "k8s")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
ABOVE = {"deployments", "loadtest", "dashboards", "k8s"}
# The arrows of the design: a package may import those named here (and itself), nothing else of service/.
BASE = {"address", "errors", "strict_yaml", "terminal", "types"}
ALLOWED = {
    "http": BASE | {"metrics"},
    "admission": BASE,
    "routing": BASE,
    "scaling": BASE | {"planning"},
    "metrics": BASE,
    "link": BASE,
    "fleet": BASE | {"admission", "link", "routing"},
    "planning": BASE | {"gguf", "routing", "admission", "scaling", "preflight", "engines", "metrics", "config"},
    "preflight": BASE | {"planning"},
    "gguf": BASE,
    "engines": BASE | {"gguf", "planning"},
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    for name in imports(path):
        root, *rest = name.split(".")
        if parts[0] != "deployments":
            assert root != "ray", f"only deployments/ imports ray, not {name}"
        assert root != "tests", "the product does not import its tests"
        if parts[0] == "service" and parts != ("service", "cli.py"):
            assert root not in ABOVE, f"service/ does not import {name}"
        # A cli.py is where the pieces of its area are put together.
        if parts[0] == "service" and len(parts) > 2 and parts[-1] != "cli.py" and root == "service" and rest:
            assert rest[0] == parts[1] or rest[0] in ALLOWED[parts[1]], f"service/{parts[1]} does not import {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_is_one_noun(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import ray\nfrom deployments.app import build\n")
    assert list(imports(bad)) == ["ray", "deployments.app"]


def test_every_key_of_the_models_part_reaches_the_ingress() -> None:
    """A setting that nobody reads is a promise that nobody keeps."""
    assert ".model.aliases" in (ROOT / "deployments" / "ingress.py").read_text(encoding="utf-8")
