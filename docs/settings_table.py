"""Writes the table of settings into README.md, between its two markers. `make readme`; a test keeps it true."""

from __future__ import annotations

import re
from pathlib import Path

from service.config import markdown_table

README = Path(__file__).resolve().parent.parent / "README.md"
BETWEEN = re.compile(r"(<!-- settings: .*? -->\n).*?(<!-- /settings -->)", re.DOTALL)

if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(BETWEEN.sub(lambda m: f"{m[1]}{markdown_table()}\n{m[2]}", text), encoding="utf-8")
