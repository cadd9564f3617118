"""From an engine's chunks to the client's events and to the whole answer: one shape, whatever the engine emits."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engines.choice import Choice
from service.errors import EngineFailed
from service.http.backend import RequestContext
from service.http.dialects.chat import Chat
from service.http.dialects.completions import Completions
from service.http.dialects.fold import Fold
from service.http.plan import Part, Plan
from service.link.delta import pack, unpack
from service.types import FINISHES, Delta, Endpoint, EngineRequest

DIALECTS: dict[Endpoint, Chat | Completions] = {"chat": Chat(), "completions": Completions()}


def answer(endpoint: Endpoint, choices: list[dict[str, Any]], index: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """(entries of `choices` of the events sent for these engine choices, the whole answer's entry)."""
    part = Part(EngineRequest("r", endpoint, b""), index, prompt=0)
    plan = Plan("r", endpoint, "m", True, False, False, 1.0, (part,), RequestContext())
    dialect = DIALECTS[endpoint]
    framer, fold = dialect.framer(plan, part, tier="default", created=7), Fold(plan, part)
    engine, events = Choice(), []
    for choice in choices:
        piece = unpack(pack(engine.read(choice)))
        events += framer.feed(piece).split(b"\n\n")
        fold.feed(piece)
    framer.close()
    fold.close()
    sent = [orjson.loads(event.removeprefix(b"data: ")) for event in events if event]
    whole = orjson.loads(dialect.whole(plan, [fold], tier="default", created=7))
    assert all(list(event) == ["id", "object", "created", "model", "service_tier", "choices"] for event in sent)
    [folded] = whole.pop("choices")
    return [entry for event in sent for entry in event["choices"]], folded


def delta(finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": fields, "finish_reason": finish, "logprobs": logprobs}


def call(arguments: Any = None, *, index: int = 0, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function} | ({"id": id} if id else {})


def run(choices: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """Everything sent for these engine choices, checked against what is promised, and against the whole answer."""
    out, whole = answer("chat", choices, index)
    assert all(entry["index"] == index for entry in out)
    assert out[0]["delta"] == {"role": "assistant", "content": ""}
    assert [entry["finish_reason"] for entry in out[:-1]] == [None] * (len(out) - 1)
    assert out[-1]["finish_reason"] in FINISHES
    assert out[-1]["delta"] == {}
    assert all("role" not in entry["delta"] for entry in out[1:])
    message = whole["message"]
    assert (whole["index"], whole["finish_reason"]) == (index, out[-1]["finish_reason"])
    assert (message["content"] or "", message.get("reasoning_content", "")) == (
        text_of(out),
        text_of(out, "reasoning_content"),
    )
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    assert calls == calls_of(out) and (message["content"] is None) == bool(calls and not text_of(out))
    streamed = [token for entry in out for token in (entry["logprobs"] or {"content": []})["content"]]
    assert (whole["logprobs"] or {"content": []})["content"] == streamed
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
    choices = [*map(piece, texts), piece(last, "stop")] + [piece("", "stop")] * again
    out, whole = answer("completions", choices, 2)
    assert "".join(e["text"] for e in out) == "".join(texts) + last == whole["text"]
    assert [e["finish_reason"] for e in out] == [None] * (len(out) - 1) + ["stop"]
    assert all(e["index"] == 2 and e["text"] for e in out[:-1])
    assert (whole["index"], whole["finish_reason"], whole["logprobs"]) == (2, "stop", None)


def test_completions_logprobs_have_the_older_shape_with_running_offsets() -> None:
    def logprob(token: str) -> dict[str, Any]:
        entry = {"id": 1, "token": token, "logprob": -0.5, "bytes": None}
        return {"content": [entry | {"top_logprobs": [entry]}]}

    own = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [None], "text_offset": [3]}
    given = [logprob("ab"), logprob("c"), own]
    choices = [piece(text, logprobs=found) for text, found in zip(("ab", "c", "x"), given, strict=True)]
    (first, second, third, _), whole = answer("completions", [*choices, piece("", "stop")])
    assert first["logprobs"] == {
        "tokens": ["ab"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"ab": -0.5}],
        "text_offset": [0],
    }
    assert second["logprobs"]["text_offset"] == [2]
    assert third["logprobs"] == own | {"top_logprobs": [{}]}
    assert whole["logprobs"] == {
        "tokens": ["ab", "c", "x"],
        "token_logprobs": [-0.5, -0.5, -1.0],
        "top_logprobs": [{"ab": -0.5}, {"c": -0.5}, {}],
        "text_offset": [0, 2, 3],
    }


def test_an_echoed_first_token_has_no_probability() -> None:
    echoed = {"tokens": ["<s>", "a"], "token_logprobs": [None, -1.0], "top_logprobs": [None, {"a": -1.0, "b": -2.0}]}
    _, whole = answer("completions", [piece("a", "stop", echoed | {"text_offset": [0, 3]})])
    assert whole["logprobs"] == echoed | {"text_offset": [0, 3]}


@pytest.mark.parametrize("choices", [[], [piece("x")], [piece("x", "stop"), piece("y")], [piece("", "error")]])
def test_broken_completions_are_the_engines_fault(choices: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineFailed):
        answer("completions", choices)


def test_events_are_these_bytes() -> None:
    """The hot path writes them without a JSON writer: what stands around the text may not drift."""
    part = Part(EngineRequest("r", "chat", b""), 1, prompt=0)
    plan = Plan("r", "chat", "m", True, True, False, 1.0, (part,), RequestContext())
    framer = Chat().framer(plan, part, tier="flex", created=7)
    head = b'data: {"id":"r","object":"chat.completion.chunk","created":7,"model":"m","service_tier":"flex","choices":['
    around = b'{"index":1,"delta":%s,"logprobs":null,"finish_reason":%s}],"usage":null}\n\n'
    assert framer.feed(Delta(prompt_tokens=3)) == head + around % (b'{"role":"assistant","content":""}', b"null")
    assert framer.feed(Delta('a"\u2028')) == head + around % ('{"content":"a\\"\u2028"}'.encode(), b"null")
    assert framer.feed(Delta(output_tokens=1)) == b""
    assert framer.feed(Delta(finish="stop")) == head + around % (b"{}", b'"stop"')
    plan = Plan("r", "completions", "m", True, False, False, 1.0, (part,), RequestContext())
    text = Completions().framer(plan, part, tier="flex", created=7)
    head = b'data: {"id":"r","object":"text_completion","created":7,"model":"m","service_tier":"flex","choices":['
    around = b'{"index":1,"text":%s,"logprobs":null,"finish_reason":%s}]}\n\n'
    assert text.feed(Delta("a")) == head + around % (b'"a"', b"null")
    assert text.feed(Delta("b", finish="stop")) == head + around % (b'"b"', b"null") + head + around % (
        b'""',
        b'"stop"',
    )
