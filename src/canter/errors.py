"""The whole exception tree. Domain code raises these; one table in the gateway maps them to HTTP."""

from __future__ import annotations


class CanterError(Exception):
    """Something that Canter itself noticed; the message says what, with which value, and what to do next."""


class ConfigError(CanterError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class StoreError(CanterError):
    """The store could not read or commit (disk full, locked by another process, newer schema)."""


class NotFound(CanterError):
    """No such rollout, attempt, call or run."""


class ThreadNotFound(NotFound):
    """The reply from which a thread of messages is to go on is not at hand."""


class Refused(CanterError):
    """A write that the lifecycle does not allow: a superseded attempt, a sealed one, or after the end."""


class Unauthorized(CanterError):
    """No key, or one that this store never issued."""


class Forbidden(CanterError):
    """A good key, but not for this."""


class BadRequest(CanterError):
    """The caller's request cannot be honoured as it is. `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextOverflow(BadRequest):
    """The prompt does not fit the model's context. With `at_least` it was not encoded: its length is a lower bound."""

    def __init__(self, prompt_tokens: int, max_tokens: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"This model's maximum context length is {max_tokens} tokens, but the messages resulted in "
            f"{'at least ' if at_least else ''}{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
            code="context_length_exceeded",
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens


class PayloadTooLarge(CanterError):
    """The request body is over `gateway.max_body_bytes`."""


class EngineError(CanterError):
    """The engine failed a request in a way that a retry may mend."""


class EngineUnavailable(EngineError):
    """No engine is registered or reachable."""

    def __init__(self, message: str, *, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class GatewayUnavailable(CanterError):
    """The gateway did not answer within the client's deadline."""


class TemplateError(CanterError):
    """The chat template cannot render these messages."""


class LaunchError(CanterError):
    """A harness or grader process could not be started."""


class GraderError(CanterError):
    """The grader failed, or gave something that is no finite number."""


class CheckpointError(CanterError):
    """A checkpoint is missing, incomplete or of another model."""


class TrainingDiverged(CanterError):
    """A loss or gradient is NaN or infinite; the message names the sample."""


class TooManyDrops(CanterError):
    """More rollouts were dropped than the run allows; the message names the most common reason."""
