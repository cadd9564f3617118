"""The errors a client can meet. Each knows its HTTP face; they are raised with facts and rendered once, in http/.

`ServiceError` crosses process borders as `to_wire()` / `from_wire()`: a class name and facts, never a pickle.
`UserError` and `Stopped` are for the command line: one sentence each. They have no HTTP face.
"""

from __future__ import annotations

from typing import Any


class UserError(Exception):
    """Bad input to a command: says what is wrong, where, and what would be right. No traceback, exit 2."""


class Stopped(Exception):
    """The service cannot run, or not any longer, through no fault of the input: says why. No traceback, exit 1."""


class ServiceError(Exception):
    """Base of the closed family. `status` is the HTTP status, `code` and `type` go into OpenAI's error envelope.

    `param` names the request field at fault; `retry_after_s` (seconds) becomes the Retry-After header.
    """

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def to_wire(self) -> dict[str, Any]:
        return {
            "class": type(self).__name__,
            "message": self.message,
            "param": self.param,
            "retry_after_s": self.retry_after_s,
        }

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> ServiceError:
        kind = _FAMILY.get(wire["class"], ServiceError)
        return kind(wire["message"], param=wire.get("param"), retry_after_s=wire.get("retry_after_s"))


class BadRequest(ServiceError):
    status, code, type = 400, "invalid_request", "invalid_request_error"


class UnsupportedField(BadRequest):
    """A field (or value) that the engine behind this pool cannot honour; refused by name, never ignored."""

    code = "unsupported_field"


class ContextOverflow(BadRequest):
    """Prompt longer than the context. The message carries both numbers."""

    code = "context_length_exceeded"


class Unauthorized(ServiceError):
    status, code, type = 401, "invalid_api_key", "authentication_error"


class Forbidden(ServiceError):
    status, code, type = 403, "tier_not_allowed", "permission_error"


class OperatorOnly(Forbidden):
    """The API key is a caller's; what was asked for is the operator's."""

    code = "operator_key_needed"


class NotFound(ServiceError):
    status, code, type = 404, "not_found", "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ServiceError):
    status, code, type = 405, "method_not_allowed", "invalid_request_error"


class BodyTooLarge(ServiceError):
    status, code, type = 413, "body_too_large", "invalid_request_error"


class HeadersTooLarge(ServiceError):
    status, code, type = 431, "headers_too_large", "invalid_request_error"


class RequestTimeout(ServiceError):
    """The request did not arrive in time."""

    status, code, type = 408, "request_timeout", "invalid_request_error"


class QuotaExceeded(ServiceError):
    """The caller's own limit (concurrency, tokens per minute)."""

    status, code, type = 429, "rate_limit_exceeded", "rate_limit_error"


class Overloaded(ServiceError):
    """The service's limit: slots busy and queue full."""

    status, code, type = 429, "overloaded", "rate_limit_error"


class EngineFailed(ServiceError):
    """The engine died or broke its promise while it held this request."""

    status, code = 500, "engine_failed"


class ReplicaLost(EngineFailed):
    """The replica died, or the way to it broke, while it held this request. `in_hand`: requests that it held."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None, in_hand: int = 0
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.in_hand = in_hand


class KillsReplica(ServiceError):
    """Replicas died with this request in hand, again and again: it is refused for a while."""

    status, code, type = 422, "request_kills_replica", "invalid_request_error"


class NotReady(ServiceError):
    """No replica can serve yet (loading) or any more."""

    status, code = 503, "not_ready"


class DeadlineExceeded(ServiceError):
    status, code = 504, "deadline_exceeded"


def _family(root: type[ServiceError]) -> dict[str, type[ServiceError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _family(child)
    return found


_FAMILY = _family(ServiceError)
