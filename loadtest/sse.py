"""Server-sent events from a byte stream that may be cut anywhere.

WHATWG HTML, section 9.2.6: lines end in LF, CR or CRLF; an empty line ends an event; lines that begin with ':' are
comments; several `data` lines join with LF; one space after the colon is dropped; a BOM may come first.
"""

from __future__ import annotations

_BOM = b"\xef\xbb\xbf"

Event = tuple[bytes, bytes]
"""(event name, b"" when absent; data)"""


class EventParser:
    """Feed bytes, get whole events. `tail` holds what has not ended yet."""

    __slots__ = ("_cr", "_first", "tail")

    def __init__(self) -> None:
        self.tail = b""
        self._cr = False  # the last read ended in CR: an LF that follows belongs to it
        self._first = True

    def feed(self, data: bytes) -> list[Event]:
        if self._first:
            data, self.tail = self.tail + data, b""
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self.tail = data
                return []
            self._first = False
            data = data.removeprefix(_BOM)
        if self._cr and data:
            self._cr = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._cr = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        blocks = (self.tail + data if self.tail else data).split(b"\n\n")
        self.tail = blocks.pop()
        events: list[Event] = []
        for block in blocks:
            # The usual shape, one data line, without a walk over lines.
            if block.startswith(b"data: ") and b"\n" not in block:
                events.append((b"", block[6:]))
            else:
                event = _parse_block(block)
                if event is not None:
                    events.append(event)
        return events

    def close(self) -> list[Event]:
        """The stream has ended. An event that lacks only its empty line is given out (servers do forget it)."""
        block, self.tail = self.tail, b""
        event = _parse_block(block) if block else None
        return [] if event is None else [event]


def _parse_block(block: bytes) -> Event | None:
    name = b""
    data: list[bytes] = []
    for line in block.split(b"\n"):
        if not line or line.startswith(b":"):
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return (name, b"\n".join(data)) if data else None
