"""Text that others wrote, made fit for a terminal: files, models and servers could otherwise move the cursor, clear the
screen, write into its title or clipboard, or show words in another order than they are in."""

from __future__ import annotations

_CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
_REORDER = [0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_LINES = [0x2028, 0x2029]
_SURROGATES = range(0xD800, 0xE000)  # no stream could encode them
_TABLE = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
    for code in (*_CONTROLS, *_REORDER, *_LINES, *_SURROGATES)
}
_SEVERAL_LINES = {code: shown for code, shown in _TABLE.items() if code not in (0x09, 0x0A)}


def one_line(text: str) -> str:
    """`text` with every control character as its escape, such as `\\x1b`, newlines and tabs too."""
    return text.translate(_TABLE)


def lines(text: str) -> str:
    """`text` with every control character as its escape, except newlines and tabs. Each character by itself, so that a
    stream may be passed piece by piece."""
    return text.translate(_SEVERAL_LINES)
