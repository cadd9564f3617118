"""The page's files: served as they are, under a strict policy, small, complete, and in the wheel."""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.app import create_app
from service.http.page import POLICY
from service.http.settings import HttpSettings
from tests.unit.http.echo import EchoBackend
from tests.unit.http.test_app import problem

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "dashboards" / "page"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file())
OURS = [name for name in FILES if not name.startswith("vendor/")]
WEIGHT = 300_000
"""Compressed bytes of all that a visit loads."""


@asynccontextmanager
async def visiting(**settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(EchoBackend(key="k"), HttpSettings(**settings), FOLDER)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as client:
        yield client


async def test_every_file_is_served_under_the_policy_and_asks_for_no_key() -> None:
    async with visiting() as client:
        for name in FILES:
            response = await client.get("/" if name == "index.html" else f"/page/{name}")
            assert response.status_code == 200 and response.content == (FOLDER / name).read_bytes()
            assert response.headers["content-security-policy"] == POLICY
            assert response.headers["x-content-type-options"] == "nosniff"
            again = await client.get(response.request.url, headers={"if-none-match": response.headers["etag"]})
            assert again.status_code == 304 and not again.content
    assert "unsafe" not in POLICY and "default-src 'none'" in POLICY and "*" not in POLICY


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "../cli.py", "%2e%2e/cli.py", "vendor", ""])
async def test_nothing_else_is(name: str) -> None:
    async with visiting() as client:
        response = await client.get(f"http://app/page/{name}")
        problem(response, 404, "not_found")


async def test_it_can_be_switched_off() -> None:
    async with visiting(page=False) as client:
        for path in ("/", "/page/main.js", "/page/vendor/uplot.js"):
            problem(await client.get(path), 404, "not_found")
        assert (await client.get("/health")).status_code == 200


async def test_a_visit_is_light() -> None:
    async with visiting() as client:
        weight = 0
        for name in FILES:
            if not name.endswith(".txt"):
                path = "/" if name == "index.html" else f"/page/{name}"
                async with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as response:
                    packed = b"".join([part async for part in response.aiter_raw()])
                assert gzip.decompress(packed) == (FOLDER / name).read_bytes()
                weight += len(packed)
    assert weight <= WEIGHT


def test_the_files_name_each_other_rightly_and_nobody_else() -> None:
    first = (FOLDER / "index.html").read_text()
    named = {name.removeprefix("page/") for name in re.findall(r'(?:src|href)="(?!#|data:)([^"]+)"', first)}
    for name in OURS:
        text = (FOLDER / name).read_text()
        assert not re.search(r"https?://", text), f"{name} names another host"
        named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert named == {name for name in FILES if not name.endswith((".txt", ".html"))}
    assert "style=" not in first and not re.search(r"<script>|\son\w+=", first)


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".js") and "/" in name])
def test_a_vendored_library_comes_with_its_licence(name: str) -> None:
    assert (FOLDER / name).with_suffix(".LICENSE.txt").read_text().strip()


@pytest.mark.parametrize("name", OURS)
def test_a_file_is_one_noun(name: str) -> None:
    assert len((FOLDER / name).read_text().splitlines()) <= 400


def test_the_wheel_holds_the_page(tmp_path: Path) -> None:
    copy = tmp_path / "tree"  # a build writes beside its source
    copy.mkdir()
    subprocess.run(["cp", "-r", "pyproject.toml", "README.md", "dashboards", copy], cwd=ROOT, check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--no-deps"]
    subprocess.run([*pip, "-w", tmp_path, copy], check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {f"dashboards/page/{name}" for name in FILES} <= held
