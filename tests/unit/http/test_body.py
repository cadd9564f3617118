"""What a body may be before anybody asks what it means: strict JSON, no deeper than allowed."""

import time

import orjson
import pytest

from service.errors import BadRequest
from service.http.body import parse_object


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"  \n", "empty"),
        (b"{", "not valid JSON"),
        (b'{"a":1}x', "not valid JSON"),
        (b'{"a":NaN}', "not valid JSON"),
        (b'{"a":Infinity}', "not valid JSON"),
        (b'{"a":1e999}', "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b'{"a":"\\ud83d"}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"{'a':1}", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"a":1,"a":1}', "'a' appears twice"),
        (b'{"x":{"b":1,"c":2,"b":3}}', "'b' appears twice"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
        (b'{"a":' + b"[" * 2000 + b"]" * 2000 + b"}", "deeper than 64"),
        (b"[" * 5_000_000, "deeper than 64"),
        (orjson.dumps({"a": {str(i): 1 for i in range(5000)}}), "5000 keys"),
    ],
)
def test_bodies_that_are_not_strict_json(body: bytes, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        parse_object(body, 64)


def test_depth_is_counted_exactly() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":[' * (levels // 2) + b'"]","[[[["' + b"]}" * (levels // 2)

    assert parse_object(nested(10), 10)
    with pytest.raises(BadRequest, match="deeper than 9"):
        parse_object(nested(10), 9)


def test_brackets_in_strings_are_not_depth() -> None:
    body = orjson.dumps({"a": '["\\' * 500, "b": [[[1]]]})
    assert parse_object(body, 8)["b"] == [[[1]]]


@pytest.mark.parametrize(
    "body", [b'{"a":"' + b'\\"' * 2_000_000, b'"\\' * 1_000_000, b'{"a":' * 1_000_000, b'"' * 3_000_001]
)
def test_hostile_bodies_take_linear_time(body: bytes) -> None:
    started = time.process_time()
    with pytest.raises(BadRequest):
        parse_object(body, 64)
    assert time.process_time() - started < 3
