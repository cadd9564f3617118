"""Every link between the documents leads somewhere, every page can be reached from the README, and every name of a way
through the code exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def links(page: Path) -> set[Path]:
    return {(page.parent / target).resolve() for target in LINK.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [str(target.relative_to(ROOT)) for target in links(page) if not target.exists()]
    assert not missing


def test_every_page_can_be_reached() -> None:
    reached, frontier = set(), {ROOT / "README.md"}
    while frontier:
        page = frontier.pop()
        reached.add(page)
        frontier |= {link for link in links(page) if link.suffix == ".md" and link.exists()} - reached
    assert {page.name for page in PAGES} - {page.name for page in reached} == set()


HOP = re.compile(r"`((?:service|deployments|dashboards|loadtest|k8s)/[\w/.]+)(?::([\w.]+))?`")


def defined(tree: ast.AST, name: str) -> bool:
    """Whether a module defines a class or function of this (dotted) name."""
    body = getattr(tree, "body", [])
    first, _, rest = name.partition(".")
    named = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return any(node.name == first and (not rest or defined(node, rest)) for node in body if isinstance(node, named))


def test_every_hop_of_how_a_request_runs_exists() -> None:
    hops = HOP.findall((ROOT / "docs/how-a-request-runs.md").read_text(encoding="utf-8"))
    assert len(hops) > 50
    missing = [file for file, _ in hops if not (ROOT / file).exists()]
    assert not missing
    trees = {file: ast.parse((ROOT / file).read_text(encoding="utf-8")) for file, name in hops if name}
    assert not [f"{file}:{name}" for file, name in hops if name and not defined(trees[file], name)]


SHOWN = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_test_that_a_page_names_exists() -> None:
    named = [pair for page in PAGES for pair in SHOWN.findall(page.read_text(encoding="utf-8"))]
    assert len(named) > 30
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not ((ROOT / file).exists() and defined(ast.parse((ROOT / file).read_text(encoding="utf-8")), name))
    ]
    assert not missing
