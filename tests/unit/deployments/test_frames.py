from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.frames import pack_bytes, pack_delta, pack_error, pack_request, unpack, unpack_request
from service.errors import _FAMILY, ContextOverflow, Overloaded, ServiceError
from service.types import Delta, EngineRequest

u32 = st.integers(0, 2**32 - 1)
deltas = st.builds(Delta, st.text(max_size=200), output_tokens=u32, prompt_tokens=st.integers(0, 1))
requests = st.builds(
    EngineRequest, st.text(max_size=40), st.sampled_from(["chat", "completions"]), st.binary(max_size=300)
)


@given(st.lists(deltas | st.binary(max_size=200), max_size=8))
def test_joined_frames_come_apart_again(sent: list[Delta | bytes]) -> None:
    message = b"".join(pack_delta(item) if isinstance(item, Delta) else pack_bytes(item) for item in sent)
    assert list(unpack(message)) == sent


@given(requests)
def test_requests(sent: EngineRequest) -> None:
    assert unpack_request(pack_request(sent)) == sent


def test_an_error_keeps_its_class_and_facts() -> None:
    sent = Overloaded("full", retry_after_s=2.5)
    (got,) = unpack(pack_error(sent))
    assert type(got) is Overloaded and got.retry_after_s == 2.5 and got.message == "full"
    (got,) = unpack(pack_error(ContextOverflow("long", param="messages")))
    assert type(got) is ContextOverflow and got.param == "messages" and got.status == 400


def test_every_error_has_its_own_face() -> None:
    faces = {(kind.status, kind.code) for kind in _FAMILY.values()}
    assert len(faces) == len(_FAMILY)
    assert all(isinstance(ServiceError.from_wire(kind("m").to_wire()), kind) for kind in _FAMILY.values())
