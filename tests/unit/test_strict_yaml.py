"""What a person may write wrong in YAML is one sentence with its line; nothing takes long or much memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from service.errors import UserError
from service.strict_yaml import MAX_ALIASES, MAX_DEPTH, Bounds, parse_yaml, read_yaml

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 3000 + "]" * 3000, f"line 1: nested deeper than {MAX_DEPTH} levels"),
        ("\n".join(" " * n + "a:" for n in range(1000)), f"nested deeper than {MAX_DEPTH} levels"),
        ("- " * 3000, f"nested deeper than {MAX_DEPTH} levels"),
        (BOMB, "line 13: more than 20000 values, those that aliases stand for included"),
        ("a: &a x\nb: [" + "*a, " * (MAX_ALIASES + 1) + "]", f"line 2: more than {MAX_ALIASES} aliases"),
        ("\na: &a\n  b: *a", "line 3: alias *a stands inside what it stands for"),
        ("a: *b", "line 1: found undefined alias"),
        ("[" + "x, " * 20_001 + "]", "more than 20000 values"),
        ("a: 1\nb: 2\na: 3", "line 3: key 'a' is there twice (first on line 1)"),
        ("x:\n  - {port: 1, 'port': 2}", "line 2: key 'port' is there twice (first on line 2)"),
        ("? [a]\n: 1", "line 1: a key must be a word or a number"),
        ("a: 2026-99-99", "line 1: '2026-99-99' is no date or number"),
        ("a: " + "9" * 5000, "is no date or number"),
        ("a: 0x" + "f" * 5000, "line 1: a number of more than 64 bits"),
        ("a: " + "1:" + "59:" * 400 + "0.5", "is no date or number"),
        ("a: !!int x", "line 1: tag tag:yaml.org,2002:int is not used here"),
        ("a: !!python/object:os.system x", "is not used here"),
        ("a: 1\n--- \nb: 2", "line 2: expected a single document"),
        ("a: 1\nb: \x1b[2J", "line 2: character U+001B is not allowed"),
        ("a: [", "line 1"),
        ("a: =", "line 1"),
        ("<<: 3", "line 1"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as fault:
        parse_yaml(text, "profile p.yaml")
    told = str(fault.value)
    assert re.match("profile p.yaml( is not YAML)?: line [0-9]+: ", told) and says in told
    assert len(told.splitlines()) == 1 and len(told) < 400


def test_what_is_right_is_read() -> None:
    text = "base: &base {slots: 2, engine: {name: simulated}}\none: {<<: *base, slots: 3}\ntwo: *base\non: 'off'\n"
    base = {"slots": 2, "engine": {"name": "simulated"}}
    assert parse_yaml(text, "p") == {"base": base, "one": base | {"slots": 3}, "two": base, True: "off"}
    assert parse_yaml("", "p") is None
    assert parse_yaml("a: 18446744073709551615", "p") == {"a": 2**64 - 1}


def test_a_file_is_read_within_its_bounds(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(b"a: b\nc: \xff")
    with pytest.raises(UserError, match=r"p\.yaml is not YAML: line 2 is not UTF-8"):
        read_yaml(path, "profile")
    path.write_text("a: " + "x" * 100)
    with pytest.raises(UserError, match="larger than 100 bytes: not a profile"):
        read_yaml(path, "profile", Bounds(bytes=100))
    with pytest.raises(UserError, match=r"profile .*: Is a directory"):
        read_yaml(tmp_path, "profile")


def test_errors_can_keep_the_text_to_themselves() -> None:
    for text in ("- a\n- {SECRET: 1, SECRET: 2}", "- a\n- *SECRET", "- a\n- !SECRET x", "- a\n- {SECRET"):
        with pytest.raises(UserError) as fault:
            parse_yaml(text, "keys file", Bounds(quotes=False))
        assert "SECRET" not in str(fault.value) and str(fault.value).endswith(": see line 2")
