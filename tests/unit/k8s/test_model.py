"""The model's volume: right files, and only right files, get the mark. A real HTTP server on loopback."""

from __future__ import annotations

import hashlib
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s import model
from k8s.model import MARK, Manifest, fill, manifest_from, manifest_of, ready, wait
from service.errors import UserError

GLM5 = str(Path(sys.executable).with_name("glm5"))
DATA = {"m-00001-of-00002.gguf": bytes(range(256)) * 4096, "m-00002-of-00002.gguf": b"second" * 50_000}


class Origin:
    """Serves DATA. `cut`: bytes after which the first answer for each file breaks off; `ranges`: honours Range."""

    def __init__(self) -> None:
        self.data = dict(DATA)
        self.cut: int | None = None
        self.ranges = True
        self.asked: list[tuple[str, str | None]] = []
        origin = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                wanted = self.headers.get("range")
                first = name not in [each for each, _ in origin.asked]
                origin.asked.append((name, wanted))
                if name not in origin.data:
                    self.send_error(404)
                    return
                start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and origin.ranges else 0
                body = origin.data[name][start:]
                self.send_response(206 if start else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: origin.cut] if origin.cut and first else body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def origin() -> Iterator[Origin]:
    found = Origin()
    thread = threading.Thread(target=found.server.serve_forever, args=(0.05,))
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join(5.0)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def manifest(base: str, **change: Any) -> Manifest:
    files = [
        {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "url": f"{base}/{name}"}
        for name, data in DATA.items()
    ]
    files[0] |= change
    return manifest_of(yaml.safe_dump({"entry": next(iter(DATA)), "files": files}), "test")


def silent(_: str) -> None:
    pass


def test_files_arrive_are_judged_and_then_marked(origin: Origin, volume: Path) -> None:
    judged: list[Path] = []

    def gate(path: Path) -> bool:
        assert not (volume / MARK).exists(), "no mark before the judgement"
        judged.append(path)
        return True

    want = manifest(origin.url)
    assert ready(want, volume) is not None
    assert fill(want, volume, gate, silent)
    assert judged == [volume / want.entry]
    assert {name: (volume / name).read_bytes() for name in DATA} == DATA
    assert ready(want, volume) is None
    asked = len(origin.asked)
    assert fill(want, volume, lambda _: False, silent), "what is ready is not judged again"
    assert len(origin.asked) == asked


def test_a_refused_model_is_never_marked(origin: Origin, volume: Path) -> None:
    want = manifest(origin.url)
    assert not fill(want, volume, lambda _: False, silent)
    assert not (volume / MARK).exists() and ready(want, volume) is not None


def test_a_broken_download_goes_on_where_it_broke(
    origin: Origin, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.time, "sleep", lambda _: None)
    origin.cut = 100_000
    assert fill(manifest(origin.url), volume, lambda _: True, silent)
    again = [wanted for name, wanted in origin.asked if name.startswith("m-00001") and wanted]
    assert len(again) == 1 and 0 < int(again[0].removeprefix("bytes=").rstrip("-")) <= 100_000


def test_a_server_without_ranges_sends_it_all_again(
    origin: Origin, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.time, "sleep", lambda _: None)
    origin.cut, origin.ranges = 100_000, False
    assert fill(manifest(origin.url), volume, lambda _: True, silent)
    assert (volume / "m-00001-of-00002.gguf").read_bytes() == DATA["m-00001-of-00002.gguf"]


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"bytes": 1000}, {"bytes": 2_000_000}])
def test_another_file_than_the_manifests_is_refused(
    change: dict[str, Any], origin: Origin, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.time, "sleep", lambda _: None)
    with pytest.raises(UserError, match=r"is not the file of the manifest|ended early"):
        fill(manifest(origin.url, **change), volume, lambda _: True, silent)
    assert not (volume / MARK).exists() and not (volume / "m-00001-of-00002.gguf").exists()


def test_a_file_that_rots_on_the_volume_is_fetched_anew(origin: Origin, volume: Path) -> None:
    want = manifest(origin.url)
    assert fill(want, volume, lambda _: True, silent)
    path = volume / "m-00002-of-00002.gguf"
    path.write_bytes(b"short")
    assert "has changed" in str(ready(want, volume))
    assert fill(want, volume, lambda _: True, silent)
    assert path.read_bytes() == DATA[path.name]


def test_the_mark_of_another_manifest_does_not_count(origin: Origin, volume: Path) -> None:
    want = manifest(origin.url)
    assert fill(want, volume, lambda _: True, silent)
    (volume / MARK).write_text(json.dumps({"manifest": "other", "entry": "x"}))
    assert "another manifest" in str(ready(want, volume))
    (volume / MARK).write_text("{}")
    assert "cannot be read" in str(ready(want, volume))


def test_a_missing_file_is_not_tried_for_ever(origin: Origin, volume: Path) -> None:
    with pytest.raises(UserError, match="404"):
        fill(manifest(origin.url, url=f"{origin.url}/nothing.gguf"), volume, lambda _: True, silent)
    assert len([name for name, _ in origin.asked if name == "nothing.gguf"]) == 1


def test_too_small_a_volume_is_said_before_anything_is_fetched(origin: Origin, volume: Path) -> None:
    with pytest.raises(UserError, match="GB are needed"):
        fill(manifest(origin.url, bytes=10**18), volume, lambda _: True, silent)
    assert not origin.asked


def test_waiting_ends_when_the_mark_comes(origin: Origin, volume: Path) -> None:
    want, said = manifest(origin.url), []
    assert not wait(want, volume, 0.05, said.append, poll_s=0.01)
    assert said == ["no mark yet: the Job has not finished"], "said once, not every poll"
    timer = threading.Timer(0.1, fill, (want, volume, lambda _: True, silent))
    timer.start()
    assert wait(want, volume, 10.0, silent, poll_s=0.02)
    timer.join()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("entry: a.gguf\nfiles: []\n", "lists no files"),
        ("entry: a.gguf\n", "lists no files"),
        ("files: 3\n", "no manifest"),
        ("a: [", "no manifest"),
        ("entry: b\nfiles: [{name: a, bytes: 1, sha256: '%s', url: 'http://x/a'}]" % ("0" * 64), "none of its files"),
        ("entry: a\nfiles: [{name: ../a, bytes: 1, sha256: '%s', url: 'http://x/a'}]" % ("0" * 64), "no manifest"),
        ("entry: a\nfiles: [{name: a, bytes: 1, sha256: '%s', url: 'file:///a'}]" % ("0" * 64), "no manifest"),
        ("entry: a\nfiles: [{name: a, bytes: 1, sha256: abc, url: 'http://x/a'}]", "no manifest"),
    ],
)
def test_a_bad_manifest_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        manifest_of(text, "test")


def test_a_manifest_made_from_files_is_what_fills_a_volume(origin: Origin, volume: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, data in DATA.items():
        (source / name).write_bytes(data)
    made = manifest_from(source, next(iter(DATA)), origin.url, silent)
    assert made == manifest(origin.url)
    assert fill(made, volume, lambda _: True, silent)


def test_the_commands_of_job_and_init_container(origin: Origin, volume: Path, tmp_path: Path) -> None:
    """A file that is no GGUF: the real gate refuses it, the volume stays unmarked, the init container says so."""
    pytest.importorskip("service.gguf.rules")
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(manifest(origin.url).model_dump(mode="json")))
    filled = subprocess.run([GLM5, "k8s", "model", "fill", str(file), "--to", str(volume), "--tp", "8"],
                            capture_output=True, text=True, timeout=60)  # fmt: skip
    assert filled.returncode == 1, filled.stderr
    assert "not marked as ready" in filled.stderr
    waited = subprocess.run([GLM5, "k8s", "model", "wait", str(file), "--at", str(volume), "--timeout-s", "0"],
                            capture_output=True, text=True, timeout=60)  # fmt: skip
    assert waited.returncode == 1 and "no mark yet" in waited.stdout


@pytest.mark.parametrize(("mix", "tp", "code"), [("ud", 1, 0), ("ud", 7, 1)])
def test_the_real_gate_decides(mix: str, tp: int, code: int, tmp_path: Path, volume: Path, origin: Origin) -> None:
    """A tiny GLM-5 file: served whole it passes; over seven GPUs its rows do not split, and the mark is withheld."""
    from tests.tiny_glm.maker import make

    path = make(tmp_path / "tiny.gguf", mix)
    origin.data = {path.name: path.read_bytes()}
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(manifest_from(tmp_path, path.name, origin.url, silent).model_dump(mode="json")))
    command = [GLM5, "k8s", "model", "fill", str(file), "--to", str(volume), "--tp", str(tp)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert (volume / MARK).exists() == (code == 0)
