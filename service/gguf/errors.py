"""What is wrong with a GGUF file, in one sentence that names the file and the key or tensor at fault."""

from __future__ import annotations

from service.errors import UserError


class GgufError(UserError):
    """The file is truncated, lying, malicious or not a GGUF. `where` is the key, tensor or header part at fault."""

    def __init__(self, path: object, where: str, problem: str) -> None:
        super().__init__(f"{path}: {where}: {problem}")
        self.where = where
        self.problem = problem
