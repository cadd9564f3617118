"""Reasoning as `encrypted_content`: opaque to clients, which send it back as it is, and readable for us. Not a secret:
the same text stands in the answer."""

from __future__ import annotations

import base64

_MARK = "glm5."


def sealed(reasoning: str) -> str:
    return _MARK + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unsealed(given: str) -> str:
    """Empty for what `sealed` did not write."""
    if not given.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(given.removeprefix(_MARK), altchars=b"-_", validate=True).decode()
    except ValueError:
        return ""
