from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.config import DEFAULT_PROFILE, PROFILES, Config, dump, entries, load, markdown_table, parse
from service.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
GLM5 = str(Path(sys.executable).with_name("glm5"))


@pytest.mark.parametrize("profile", sorted(PROFILES.glob("*.yaml")), ids=lambda p: p.name)
def test_every_packaged_profile_is_right_and_survives_a_round_trip(profile: Path, tmp_path: Path) -> None:
    config = load(profile)
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump(config))
    assert load(copy) == config


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"htpp": {}}, ["unknown key htpp", "did you mean http"]),
        ({"http": {"prot": 1}}, ["unknown key http.prot", "did you mean http.port"]),
        ({"pools": {"shared": {"slot": 3}}}, ["unknown key pools.shared.slot", "pools.<pool>.slots"]),
        ({"pools": {"shared": {"engine": {"name": "llamacpp", "thread": 3}}}}, ["engine.thread", "engine.threads"]),
        ({"pools": {"fast": {}}}, ["unknown pool fast", "latency"]),
        ({"pools": {"latency": {}}}, ["either `shared` alone or `latency` and `throughput`"]),
        ({"pools": {"shared": {"slots": 0}}}, ["pools.shared.slots", "greater than or equal to 1"]),
        ({"pools": {"shared": {"slots": 2, "reserved_slots": 2}}}, ["reserved_slots (2)"]),
        ({"pools": {"shared": {"min_replicas": 3, "max_replicas": 2}}}, ["max_replicas (2) is below min_replicas (3)"]),
        ({"pools": {"shared": {"engine": {"name": "llama"}}}}, ["llamacpp", "simulated", "vllm"]),
        ({"http": {"port": "eighty"}}, ["http.port", "eighty"]),
    ],
)
def test_a_fault_names_the_key_and_what_would_be_right(tree: dict, words: list[str]) -> None:
    with pytest.raises(UserError) as fault:
        parse(tree, "p.yaml")
    assert all(word in str(fault.value) for word in ["p.yaml", *words]), str(fault.value)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(UserError) as fault:
        parse({"htpp": {}, "http": {"port": -1}})
    assert len(str(fault.value).splitlines()) == 2


def test_overrides_take_yaml_values() -> None:
    config = load(None, ["pools.shared.slots=3", "http.cors_origins=[a, b]", "pools.shared.engine={name: simulated}"])
    assert config.pools["shared"].slots == 3
    assert config.http.cors_origins == ("a", "b")
    assert config.pools["shared"].engine.name == "simulated"


@pytest.mark.parametrize("override", ["slots", "=3", "http.port.deep=1", "http.port=[1"])
def test_a_bad_override_is_named(override: str) -> None:
    with pytest.raises(UserError, match=r"--set"):
        load(None, ["http.port=1", override])


@pytest.mark.parametrize("text", ["- a\n- b", "a: [", "just words", "\x00"])
def test_a_file_that_is_no_profile(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"p\.yaml"):
        load(path)


def test_a_missing_profile_names_those_that_exist() -> None:
    with pytest.raises(UserError, match=r"local-cpu\.yaml"):
        load(Path("/nowhere.yaml"))


def test_every_key_is_documented() -> None:
    for entry in entries():
        assert len(entry.description) > 10, entry.key
    assert len({entry.key for entry in entries() if "(" not in entry.description}) > 30


def test_the_readme_has_the_table_of_keys() -> None:
    assert markdown_table() in (ROOT / "README.md").read_text(encoding="utf-8"), "run: make readme"


def test_defaults_are_what_an_empty_profile_gives() -> None:
    assert parse({}) == Config()
    assert yaml.safe_load(DEFAULT_PROFILE.read_text())["model"]["path"] == "demo"


def test_the_other_mode_is_this_one_changed_and_leads_back() -> None:
    engine = {"name": "vllm", "mode": "interactivity", "mtp_tokens": 3}
    other = {"slots": 256, "engine": {"mode": "throughput", "mtp_tokens": 0}}
    tree = {"pools": {"shared": {"engine": engine, "slots": 4, "other_mode": other}}}
    pool = parse(tree).pools["shared"]
    changed = pool.converted()
    assert (changed.slots, changed.engine.mode, changed.engine.mtp_tokens) == (256, "throughput", 0)
    assert changed.converted() == pool
    assert pool.most_slots == changed.most_slots == 256


def test_an_other_mode_that_the_engine_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match="threds"):
        parse({"pools": {"shared": {"other_mode": {"slots": 4, "engine": {"threds": 1}}}}})
    with pytest.raises(UserError, match="other_mode"):
        parse({"scaling": {"convert": "on", "hardware": "8x-h200"}})
    assert parse(yaml.safe_load("scaling: {convert: off}")).scaling.convert == "off"


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"CPU": -1}, "Ray's own"),
        ({"GPU": 1}, "Ray's own"),
        ({"slot": -1}, "greater than or equal to 0"),
        ({"slot": 0.5}, "multiple of 1"),
        ({"slot": float("nan")}, "finite"),
        ({"slot": float("inf")}, "finite"),
        ({"slot": 1e15}, "less than or equal"),
    ],
)
def test_resources_that_ray_would_not_take_are_refused(resources: dict, says: str) -> None:
    with pytest.raises(UserError, match=r"ray\.resources") as fault:
        parse({"ray": {"resources": resources}})
    assert says in str(fault.value)
    assert parse({"ray": {"resources": {"slot": 8}}}).ray.resources == {"slot": 8}


def test_no_setting_is_infinite_or_no_number() -> None:
    for key in ("pools.shared.cpus", "pools.shared.drain_s", "scaling.budget", "ingress.cpus", "http.idle_timeout_s"):
        for value in (".inf", ".nan"):
            with pytest.raises(UserError, match=key.replace(".", r"\.")):
                load(None, [f"{key}={value}"])


def test_a_file_of_nothing_but_faults_is_answered_shortly(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("".join(f"k{n}: 1\n" for n in range(5000)))
    with pytest.raises(UserError) as fault:
        load(path)
    lines = str(fault.value).splitlines()
    assert len(lines) == 21 and "4980 more faults" in lines[-1]
    with pytest.raises(UserError, match="no key has more than"):
        load(None, ["pools.shared.other_mode.engine" + ".a" * 3000 + "=1"])


def glm5(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([GLM5, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--port", "99999"], "http.port: Input should be less than or equal to 65535 (got 99999)"),
        (["serve", "--port", "-1"], "http.port: Input should be greater than or equal to 0 (got -1)"),
        (["config", "check", "--set", "admission.keys_file=/nope"], "keys file /nope: No such file or directory"),
        (["serve", "--set", "admission.keys_file=/nope"], "keys file /nope: No such file or directory"),
        (["config", "check", "--set", "admission.anonymous=false"], "nobody could ask anything"),
        (["config", "check", "--set", "ray.resources={slot: -1}"], "ray.resources.slot"),
    ],
)
def test_the_command_line_says_a_mistake_in_one_line(arguments: list[str], says: str) -> None:
    code, told = glm5(*arguments)
    assert code == 2 and told.startswith("error: ") and says in told and len(told.splitlines()) == 1, told
