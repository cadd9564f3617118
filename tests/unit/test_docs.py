"""Every link between the documents leads somewhere, and every page can be reached from the README."""

from __future__ import annotations

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
