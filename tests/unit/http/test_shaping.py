from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import EngineFailed
from service.http.shaping import FINISHES, ChatChoice, TextChoice


def delta(finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": fields, "finish_reason": finish, "logprobs": logprobs}


def call(arguments: Any = None, *, index: int = 0, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function} | ({"id": id} if id else {})


def run(choices: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Everything the shaper sends for these engine choices, checked against what it promises."""
    shaper = ChatChoice(index)
    out = [entry for choice in choices for entry in shaper.feed(choice)]
    shaper.close()
    assert all(entry["index"] == index for entry in out)
    assert out[0]["delta"] == {"role": "assistant", "content": ""}
    assert [entry["finish_reason"] for entry in out[:-1]] == [None] * (len(out) - 1)
    assert out[-1]["finish_reason"] in FINISHES
    assert out[-1]["delta"] == {}
    assert all("role" not in entry["delta"] for entry in out[1:])
    return out


def text_of(out: list[dict[str, Any]], key: str = "content") -> str:
    return "".join(entry["delta"].get(key, "") for entry in out)


def calls_of(out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls assembled as OpenAI's SDK does: by index, strings joined."""
    calls: list[dict[str, Any]] = []
    for entry in out:
        for part in entry["delta"].get("tool_calls", ()):
            if part["index"] == len(calls):
                assert part["id"] and part["type"] == "function" and part["function"]["name"]
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            else:
                assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return calls


def test_llamacpp_shape() -> None:
    out = run([delta(role="assistant", content=None), delta(content="He"), delta(content="llo"), delta("stop")])
    assert [entry["delta"] for entry in out] == [
        {"role": "assistant", "content": ""},
        {"content": "He"},
        {"content": "llo"},
        {},
    ]


def test_vllm_shape_finish_beside_text_is_split() -> None:
    out = run([delta(role="assistant", content=""), delta("length", content="Hi")], index=3)
    assert [entry["delta"] for entry in out] == [{"role": "assistant", "content": ""}, {"content": "Hi"}, {}]
    assert out[-1]["finish_reason"] == "length"


def test_no_role_from_the_engine_is_mended_and_an_empty_answer_has_one() -> None:
    assert len(run([delta(content="x"), delta("stop")])) == 3
    assert len(run([delta("stop")])) == 2


def test_empty_pieces_are_not_sent() -> None:
    assert len(run([delta(), delta(content=""), delta(content=None), delta("stop", content="")])) == 2


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_has_one_name(key: str) -> None:
    out = run([delta(**{key: "because"}), delta(content="so"), delta("stop")])
    assert text_of(out, "reasoning_content") == "because"
    assert text_of(out) == "so"


def test_logprobs_travel_with_their_text_without_engines_extras() -> None:
    entry = {"id": 5, "token": "a", "logprob": -1.0, "bytes": [97]}
    out = run([delta(content="a", logprobs={"content": [entry | {"top_logprobs": [entry]}]}), delta("stop")])
    bare = {"token": "a", "logprob": -1.0, "bytes": [97]}
    assert out[1]["logprobs"] == {"content": [bare | {"top_logprobs": [bare]}], "refusal": None}
    assert [e["logprobs"] for e in (out[0], out[2])] == [None, None]


@pytest.mark.parametrize(
    ("pieces", "arguments"),
    [
        ([call("", name="f", id="1"), call('{"a"'), call(":1}")], '{"a":1}'),
        ([call('{"a":1}', name="f", id="1")], '{"a":1}'),
        ([call(name="f", id="1")], "{}"),
        ([call("", name="f")], "{}"),
        ([call(" ", name="f")], " {}"),
        ([call("{", name="f", id="1"), call("}", name="f", id="1")], "{}"),
        ([call({"a": 1}, name="f")], '{"a":1}'),
    ],
)
def test_arguments_assemble_to_json(pieces: list[dict[str, Any]], arguments: str) -> None:
    out = run([*(delta(tool_calls=[piece]) for piece in pieces), delta("tool_calls")])
    [made] = calls_of(out)
    assert made["name"] == "f" and made["arguments"] == arguments
    orjson.loads(made["arguments"])


def test_parallel_calls_are_numbered_from_zero_in_order_of_appearance() -> None:
    pieces = [call("{}", index=4, name="f"), call("{", index=7, name="g"), call("}", index=7)]
    out = run([delta(tool_calls=pieces), delta("tool_calls")])
    assert [(made["name"], made["arguments"]) for made in calls_of(out)] == [("f", "{}"), ("g", "{}")]


def test_arguments_cut_by_length_pass_as_they_are() -> None:
    out = run([delta(tool_calls=[call('{"a', name="f")]), delta("length")])
    assert calls_of(out)[0]["arguments"] == '{"a'


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [delta(content="x")],
        [delta("abort")],
        [delta("stop"), delta(content="more")],
        [delta("stop"), delta(tool_calls=[call("{}", name="f")])],
        [delta(tool_calls=[call("{}")]), delta("tool_calls")],
        [delta(tool_calls=[call("{x", name="f")]), delta("tool_calls")],
    ],
)
def test_broken_answers_are_the_engines_fault(choices: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineFailed):
        run(choices)


def test_an_empty_repeat_of_the_finish_is_not_sent() -> None:
    assert len(run([delta(content="x"), delta("stop"), delta("stop"), delta()])) == 3


PIECES = st.lists(
    st.one_of(
        st.builds(lambda t: delta(content=t), st.text(max_size=8)),
        st.builds(lambda t: delta(reasoning_content=t), st.text(max_size=8)),
        st.builds(lambda: delta(role="assistant", content=None)),
        st.builds(
            lambda index, t: delta(tool_calls=[call(t, index=index, name="f")]),
            st.integers(0, 3),
            st.sampled_from(["", "{}"]),
        ),
    ),
    max_size=12,
)


@given(PIECES, st.sampled_from(sorted(FINISHES)), st.text(max_size=4), st.integers(0, 5))
def test_any_order_of_pieces_keeps_the_promises(
    pieces: list[dict[str, Any]], finish: str, last: str, index: int
) -> None:
    given_calls: dict[int, str] = {}
    for piece in pieces:
        for made in piece["delta"].get("tool_calls", ()):
            given_calls[made["index"]] = given_calls.get(made["index"], "") + made["function"]["arguments"]
    valid = all(arguments in ("", "{}") for arguments in given_calls.values())
    choices = [*pieces, delta(finish, content=last)]
    if not valid and finish != "length":
        with pytest.raises(EngineFailed):
            run(choices, index)
        return
    out = run(choices, index)
    assert text_of(out) == "".join(p["delta"].get("content") or "" for p in choices)
    assert text_of(out, "reasoning_content") == "".join(p["delta"].get("reasoning_content", "") for p in pieces)
    assert [made["arguments"] or "{}" for made in calls_of(out)] == [text or "{}" for text in given_calls.values()]


def piece(text: str, finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish, "logprobs": logprobs}


@given(st.lists(st.text(max_size=8)), st.text(max_size=4), st.booleans())
def test_completions_keep_their_promises(texts: list[str], last: str, again: bool) -> None:
    shaper = TextChoice(2)
    out = [e for text in texts for e in shaper.feed(piece(text))]
    out += shaper.feed(piece(last, "stop"))
    if again:
        assert shaper.feed(piece("", "stop")) == []
    shaper.close()
    assert "".join(e["text"] for e in out) == "".join(texts) + last
    assert [e["finish_reason"] for e in out] == [None] * (len(out) - 1) + ["stop"]
    assert all(e["index"] == 2 and e["text"] for e in out[:-1])


def test_completions_logprobs_have_the_older_shape_with_running_offsets() -> None:
    def logprob(token: str) -> dict[str, Any]:
        entry = {"id": 1, "token": token, "logprob": -0.5, "bytes": None}
        return {"content": [entry | {"top_logprobs": [entry]}]}

    shaper = TextChoice(0)
    first = shaper.feed(piece("ab", logprobs=logprob("ab")))
    second = shaper.feed(piece("c", logprobs=logprob("c")))
    assert first[0]["logprobs"] == {
        "tokens": ["ab"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"ab": -0.5}],
        "text_offset": [0],
    }
    assert second[0]["logprobs"]["text_offset"] == [2]
    own = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": None, "text_offset": [3]}
    assert shaper.feed(piece("x", logprobs=own))[0]["logprobs"] == own


@pytest.mark.parametrize("choices", [[], [piece("x")], [piece("x", "stop"), piece("y")], [piece("", "error")]])
def test_broken_completions_are_the_engines_fault(choices: list[dict[str, Any]]) -> None:
    shaper = TextChoice(0)
    with pytest.raises(EngineFailed):
        for choice in choices:
            shaper.feed(choice)
        shaper.close()
