"""Who a caller is and what they may take; and that a key is never written down."""

from __future__ import annotations

import contextlib
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from service.admission.cli import app
from service.admission.keys import WINDOW_S, Caller, KeyEntry, KeyRing, digest, read_entries
from service.admission.share import Part
from service.errors import BadRequest, OperatorOnly, QuotaExceeded, Unauthorized, UserError
from service.types import Delta

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


def test_operators() -> None:
    """Where callers need a key, what concerns the service needs an operator's; elsewhere any known key, or none."""
    entries = [entry("caller", "c"), entry("boss", "b", operator=True), entry("old", "o", operator=True, expires=1)]
    closed, open_ = KeyRing(entries, None), KeyRing(entries, Caller("anonymous", "default"))
    closed.admit_operator("b")
    with pytest.raises(OperatorOnly):
        closed.admit_operator("c")
    for credential in (None, "wrong", "o"):
        with pytest.raises(Unauthorized):
            closed.admit_operator(credential)
    for credential in (None, "c", "b"):
        open_.admit_operator(credential)
    with pytest.raises(Unauthorized):
        open_.admit_operator("wrong")


def test_concurrency() -> None:
    caller = Caller("a", "priority", concurrency=2)
    with caller.spend(1), caller.spend(1):
        with pytest.raises(QuotaExceeded), caller.spend(1):
            raise AssertionError("a third got in")
        assert caller.running == 2
    assert caller.running == 0
    with pytest.raises(KeyError), caller.spend(1):
        raise KeyError
    assert caller.running == 0


def admitted(caller: Caller) -> int:
    """How many requests the caller may run at once."""
    with contextlib.ExitStack() as held:
        for count in range(1000):
            try:
                held.enter_context(caller.spend(1))
            except QuotaExceeded as refused:
                assert refused.retry_after_s == 1.0
                return count
    raise AssertionError("no limit at all")


def tokens_left(caller: Caller) -> int:
    """How many tokens it may use before it is refused, one a request."""
    for count in range(1000):
        try:
            with caller.spend(1) as spending:
                spending.used(Delta(output_tokens=1))
        except QuotaExceeded:
            return count
    raise AssertionError("no limit at all")


@pytest.mark.parametrize("ids", ["a", "ab", "cab", "edcba", "abcdefghi"])
@pytest.mark.parametrize("limit", [1, 4, 5, 50])
def test_the_ingresses_shares_of_a_limit_add_up_to_it(ids: str, limit: int) -> None:
    rings = [KeyRing([entry("a", "k", concurrency=limit, tokens_per_minute=10 * limit)], None) for _ in ids]
    for own, keys in zip(ids, rings, strict=True):
        keys.divide(own, set(ids) - ({own} if own == "c" else set()))
    at_once = [admitted(keys.find("k")) for keys in rings]
    assert sum(at_once) == limit and max(at_once) - min(at_once) <= 1
    callers = [keys.find("k") for keys in rings]
    for caller in callers:
        caller.concurrency = None
    assert sum(map(tokens_left, callers)) == 10 * limit


def test_an_ingress_that_goes_leaves_its_share_to_the_others() -> None:
    keys = KeyRing([entry("a", "k", concurrency=4)], None)
    keys.divide("b", ["a", "b"])
    assert admitted(keys.find("k")) == 2
    keys.divide("b", ["b"])
    assert admitted(keys.find("k")) == 4


@pytest.mark.parametrize(
    ("limit", "of", "siblings", "fits"),
    [(4, 1, 4, True), (4, 1, 5, False), (1, 1, 2, False), (4, 2, 2, True), (4, 2, 3, False), (5, 2, 3, True)],
)
def test_more_answers_at_once_than_can_ever_run_are_a_bad_request(
    limit: int, of: int, siblings: int, fits: bool
) -> None:
    """Nothing that the caller waits for would let it in, so it is not told to come back."""
    callers = [Caller("a", "priority", concurrency=limit, part=Part(index, of)) for index in range(of)]
    if fits:
        with contextlib.ExitStack() as held:
            for _ in range(siblings):
                held.enter_context(callers[0].spend(siblings))
        return
    for caller in callers:
        with pytest.raises(BadRequest) as refused, caller.spend(siblings):
            raise AssertionError
        assert refused.value.status == 400 and refused.value.param == "n" and refused.value.retry_after_s is None
        assert f"{siblings} answers" in refused.value.message and f"may run {limit} at once" in refused.value.message
        assert caller.running == 0


def test_where_another_ingress_could_run_them_the_caller_comes_back() -> None:
    """A limit of 5 at two ingresses: 3 at one, 2 at the other."""
    caller = Caller("a", "priority", concurrency=5, part=Part(1, 2))
    with caller.spend(3), caller.spend(3), pytest.raises(QuotaExceeded), caller.spend(3):
        raise AssertionError


def test_tokens_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("service.admission.keys.time.monotonic", lambda: now[0])
    caller = Caller("a", "priority", tokens_per_minute=100)
    for second, tokens in ((0.0, 60), (10.0, 60)):
        now[0] = 1000.0 + second
        with caller.spend(1) as spending:
            spending.used(Delta(output_tokens=tokens - 10, prompt_tokens=10))
    now[0] = 1020.0
    with pytest.raises(QuotaExceeded) as refused, caller.spend(1):
        raise AssertionError
    # The first 60 leave the window at 1060, and then 60 of 100 are used.
    assert refused.value.retry_after_s == pytest.approx(1000.0 + WINDOW_S - now[0])
    now[0] += refused.value.retry_after_s + 0.001
    with caller.spend(1):
        pass
    assert len(caller.spent) == 1


@pytest.mark.parametrize(("prompt", "answer"), [(60, 40), (100, 0), (0, 100), (99, 1)])
def test_prompts_and_answers_count_alike(prompt: int, answer: int) -> None:
    caller = Caller("a", "priority", tokens_per_minute=100)
    with caller.spend(1) as spending:
        spending.used(Delta(prompt_tokens=prompt, cached_tokens=prompt // 2))
        for _ in range(answer):
            spending.used(Delta(output_tokens=1))
    with pytest.raises(QuotaExceeded, match="used 100 of 100 tokens"), caller.spend(1):
        raise AssertionError


def test_one_token_below_the_limit_is_let_in() -> None:
    caller = Caller("a", "priority", tokens_per_minute=100)
    with caller.spend(1) as spending:
        spending.used(Delta(output_tokens=39, prompt_tokens=60))
    with caller.spend(1):
        pass


def test_books_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("service.admission.keys.time.monotonic", lambda: now[0])
    caller = Caller("a", "priority", tokens_per_minute=10**9)
    with caller.spend(1) as spending:
        for _ in range(5000):
            now[0] += 0.01
            spending.used(Delta(output_tokens=1))
    assert len(caller.spent) <= 51 and sum(n for _, n in caller.spent) == 5000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not YAML"),
        ("name: x", "must be a list"),
        ("- name: x", "entry 1: sha256: Field required"),
        ("- {name: x, sha256: SECRET}", "entry 1: sha256"),
        (f"- {{name: x, sha256: {'0a' * 32}, limit: 3}}", "entry 1: limit"),
        (f"- {{name: x, sha256: {'0a' * 32}, expires: 1.0e+305}}", "entry 1: expires: Input should be less than"),
        (f"- {{name: x, sha256: {'0a' * 32}, expires: .nan}}", "entry 1: expires"),
        (f"- {{name: x, sha256: {'0a' * 32}, expires: -1}}", "entry 1: expires"),
        (f"- {{name: x, sha256: {'0a' * 32}, SECRET: 1, SECRET: 2}}", "see line 1"),
        (f'- {{name: "\\ud800", sha256: {"0a" * 32}}}', "entry 1: name"),
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
    boss = glm5("add", "boss", "--operator").stdout.strip()
    KeyRing(read_entries(path), None).admit_operator(boss)
    with pytest.raises(OperatorOnly):
        KeyRing(read_entries(path), None).admit_operator(key)
    again = glm5("add", "alice")
    assert again.returncode == 2 and "already" in again.stderr and "Traceback" not in again.stderr
    listing = glm5("list", "--json").stdout
    assert '"alice"' in listing and digest(key).hex() not in listing


def keys(file: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and both outputs of `glm5 keys`, in this process. A traceback fails the test."""
    result = CliRunner().invoke(app, [*arguments, "--file", str(file)], env={"COLUMNS": "200"})
    if isinstance(result.exception, UserError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("days", ["1e300", "36501", "nan", "inf", "-inf", "-1"])
def test_days_that_no_calendar_has_are_refused(tmp_path: Path, days: str) -> None:
    path = tmp_path / "keys.yaml"
    code, told = keys(path, "add", "alice", "--days", days)
    assert code == 2 and "it is 0 to 36500" in told
    assert not path.exists()


@pytest.mark.parametrize("limit", ["--concurrency", "--tokens-per-minute"])
def test_limits_that_could_not_be_read_back_are_refused(tmp_path: Path, limit: str) -> None:
    assert keys(tmp_path / "keys.yaml", "add", "alice", limit, "9" * 30)[0] == 2
    assert not (tmp_path / "keys.yaml").exists()


def test_what_may_be_added_can_be_listed(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for name, more in (
        ("[red]a[/b]", ["--days", "36500"]),
        ("b: {c", ["--days", "0"]),
        ("\u4f60\u597d", ["--concurrency", "1000000", "--tokens-per-minute", str(10**12)]),
    ):
        assert keys(path, "add", name, *more)[0] == 0
    code, listing = keys(path, "list")
    assert code == 0
    for shown in ("[red]a[/b]", "b: {c", "\u4f60\u597d", "(expired)", str(10**12)):
        assert shown in listing


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for name in ("a\x1b[2J", "a\nb", "\u202eecila", "\udcff"):
        assert keys(path, "add", name) == (2, "NAME must not hold control characters")
    path.write_text(f'- {{name: "a\\e[2Jb", sha256: {digest(GOOD).hex()}}}')
    code, listing = keys(path, "list")
    assert code == 0 and "a\\x1b[2Jb" in listing and "\x1b" not in listing
    checked = CliRunner().invoke(app, ["check", "--file", str(path)], input=GOOD + "\n")
    assert checked.output == "a\\x1b[2Jb: good, tier priority at most\n"


def test_a_file_that_cannot_be_there_is_one_sentence(tmp_path: Path) -> None:
    assert keys(tmp_path / ("x" * 300), "add", "a") == (2, f"keys file {tmp_path / ('x' * 300)}: File name too long")
    assert keys(tmp_path, "add", "a") == (2, f"keys file {tmp_path}: Is a directory")
