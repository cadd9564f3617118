from __future__ import annotations

from typing import Any

from service.http.plan import _session


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_turns_of_a_conversation_are_one_session_and_other_conversations_others() -> None:
    first = [said("system", "Be brief."), said("user", "Hello")]
    later = [*first, said("assistant", "Hi"), said("user", "Again")]
    assert _session(first) == _session(later) != ""
    assert _session(first) != _session([first[0], said("user", "Other")])
    assert _session([]) == _session([first[0]]) == ""
