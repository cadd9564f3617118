"""An engine's pieces of an answer put together."""

from __future__ import annotations

from collections.abc import Iterable

from service.types import Delta


def joined(deltas: Iterable[Delta]) -> Delta:
    """One delta that says all that these say. They must hold exactly one finish, and say nothing after it."""
    pieces = tuple(deltas)
    (end,) = (at for at, piece in enumerate(pieces) if piece.finish is not None)
    assert not any(piece.says_something for piece in pieces[end + 1 :])
    return Delta(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=tuple(part for piece in pieces for part in piece.calls),
        logprobs=tuple(token for piece in pieces for token in piece.logprobs),
        finish=pieces[end].finish,
        output_tokens=sum(piece.output_tokens for piece in pieces),
        prompt_tokens=sum(piece.prompt_tokens for piece in pieces),
        cached_tokens=sum(piece.cached_tokens for piece in pieces),
        reasoning_tokens=sum(piece.reasoning_tokens for piece in pieces),
        drafted=sum(piece.drafted for piece in pieces),
        accepted=sum(piece.accepted for piece in pieces),
    )
