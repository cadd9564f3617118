"""Who a caller is and what they may take; and that a key is never written down."""

from __future__ import annotations

import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from service.admission.keys import WINDOW_S, Caller, KeyEntry, KeyRing, digest, read_entries
from service.errors import QuotaExceeded, Unauthorized, UserError
from service.types import Chunk

GLM5 = str(Path(sys.executable).with_name("glm5"))
GOOD = "glm-" + "a" * 43


def entry(name: str, key: str, **rest: object) -> KeyEntry:
    return KeyEntry.model_validate({"name": name, "sha256": digest(key).hex(), **rest})


def ring(anonymous: bool = False) -> KeyRing:
    entries = [entry("other", "x"), entry("good", GOOD, tier="flex"), entry("old", "old", expires=time.time() - 1)]
    return KeyRing(entries, Caller("anonymous", "default") if anonymous else None)


def test_a_good_key_is_found() -> None:
    caller = ring().find(GOOD)
    assert (caller.name, caller.ceiling) == ("good", "flex")
    assert ring(anonymous=True).find(None).name == "anonymous"


@pytest.mark.parametrize(
    "credential", [None, "", GOOD + "b", GOOD[:-1], "old", "\ud800", "x" * 1_000_000, digest(GOOD).hex()]
)
def test_any_other_is_refused_without_saying_it(credential: str | None) -> None:
    with pytest.raises(Unauthorized) as refused:
        ring().find(credential)
    assert not credential or credential[:600] not in str(refused.value.to_wire())


def test_a_wrong_key_is_not_anonymous() -> None:
    with pytest.raises(Unauthorized):
        ring(anonymous=True).find("wrong")


def test_concurrency() -> None:
    caller = Caller("a", "priority", concurrency=2)
    with caller.spend(), caller.spend():
        with pytest.raises(QuotaExceeded), caller.spend():
            raise AssertionError("a third got in")
        assert caller.running == 2
    assert caller.running == 0
    with pytest.raises(KeyError), caller.spend():
        raise KeyError
    assert caller.running == 0


@pytest.mark.parametrize(("processes", "each"), [(1, 5), (2, 3), (5, 1), (9, 1)])
def test_limits_are_shared_between_ingresses(processes: int, each: int) -> None:
    keys = KeyRing([entry("a", "k", concurrency=5, tokens_per_minute=50)], None)
    keys.divide(processes)
    caller = keys.find("k")
    caller.running = each - 1
    with caller.spend(), pytest.raises(QuotaExceeded), caller.spend():
        raise AssertionError


def test_tokens_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("service.admission.keys.time.monotonic", lambda: now[0])
    caller = Caller("a", "priority", tokens_per_minute=100)
    for second, tokens in ((0.0, 60), (10.0, 60)):
        now[0] = 1000.0 + second
        with caller.spend() as spending:
            spending.used(Chunk(b"", output_tokens=tokens - 10, prompt_tokens=10))
    now[0] = 1020.0
    with pytest.raises(QuotaExceeded) as refused, caller.spend():
        raise AssertionError
    # The first 60 leave the window at 1060, and then 60 of 100 are used.
    assert refused.value.retry_after_s == pytest.approx(1000.0 + WINDOW_S - now[0])
    now[0] += refused.value.retry_after_s + 0.001
    with caller.spend():
        pass
    assert len(caller.spent) == 1


def test_books_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("service.admission.keys.time.monotonic", lambda: now[0])
    caller = Caller("a", "priority", tokens_per_minute=10**9)
    with caller.spend() as spending:
        for _ in range(5000):
            now[0] += 0.01
            spending.used(Chunk(b"", output_tokens=1))
    assert len(caller.spent) <= 51 and sum(n for _, n in caller.spent) == 5000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not YAML"),
        ("name: x", "must be a list"),
        ("- name: x", "entry 1: sha256: Field required"),
        ("- {name: x, sha256: SECRET}", "entry 1: sha256"),
        (f"- {{name: x, sha256: {'0a' * 32}, limit: 3}}", "entry 1: limit"),
        (f"- {{name: x, sha256: {'0a' * 32}}}\n- {{name: x, sha256: {'1a' * 32}}}", "the same name"),
        (f"- {{name: x, sha256: {'0a' * 32}}}\n- {{name: y, sha256: {'0a' * 32}}}", "the same sha256"),
    ],
)
def test_a_wrong_file_is_explained_without_its_hashes(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as fault:
        read_entries(path)
    assert says in str(fault.value)
    assert "SECRET" not in str(fault.value) and "0a" * 32 not in str(fault.value)


def test_the_command_shows_a_key_once_and_keeps_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"

    def glm5(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        command = [GLM5, "keys", *arguments, "--file", str(path)]
        return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)

    made = glm5("add", "alice", "--tier", "flex", "--concurrency", "2", "--days", "1")
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    assert key.startswith("glm-") and len(key) > 40
    assert key not in path.read_text() and key not in made.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [e["name"] for e in yaml.safe_load(path.read_text())] == ["alice"]
    assert KeyRing(read_entries(path), None).find(key).concurrency == 2
    assert "alice" in glm5("check", given=key + "\n").stdout
    assert "unknown key" in glm5("check", given="wrong\n").stdout
    again = glm5("add", "alice")
    assert again.returncode == 2 and "already" in again.stderr and "Traceback" not in again.stderr
    listing = glm5("list", "--json").stdout
    assert '"alice"' in listing and digest(key).hex() not in listing
