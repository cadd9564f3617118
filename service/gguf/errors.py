"""What is wrong with a GGUF file, in one sentence that names the file and the key or tensor at fault."""

from __future__ import annotations

from service.errors import UserError
from service.terminal import one_line


class GgufError(UserError):
    """The file is truncated, lying, malicious or not a GGUF. `where` is the key, tensor or header part at fault."""

    def __init__(self, path: object, where: str, problem: str) -> None:
        super().__init__(one_line(f"{path}: {where}: {problem}"))
        self.where = where
        self.problem = problem
