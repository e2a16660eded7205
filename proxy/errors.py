"""Every error that base-rl answers with. Each class carries its HTTP status and its OpenAI error type and code.

BaseRlError
├── InvalidRequest            400  the request is wrong; `param` names the field
│   ├── UnsupportedParameter  400  understood, and this engine or run cannot honour it
│   ├── ContextLengthExceeded 400  the prompt leaves no room for an answer
│   └── WeightsRejected       400  a version that no engine should be given
│       └── WeightsMissing    400  its files are not there
├── AuthenticationFailed      401  no key, or one that is unknown or revoked
│   └── KeyExpired            401  the key was made for a limited time, which has passed
├── PermissionDenied          403  a valid key that may not do this
├── NotFound                  404
│   ├── ModelNotFound         404
│   └── PreviousResponseNotFound 404
├── Conflict                  409  the head moved, the claim is gone, a run has this name, an Idempotency-Key is taken
├── Gone                      410  the session was erased
│   ├── RunArchived           410  the run keeps its data and serves nothing
│   └── NameUsed              410  the session of this name has ended, and the run refuses to reuse names
├── RequestTimedOut           408  the request did not arrive whole in time
├── PayloadTooLarge           413
├── HeadersTooLarge           431
├── RateLimited               429  with Retry-After: more calls a minute than a limit
│   ├── TokensLimited         429  more tokens a minute than a limit
│   ├── BudgetExhausted       429  the budget of tokens for the day or month is used
│   ├── TooManyBytes          429  the key's bound on bodies in work is reached
│   └── TrainerBehind         429  too many trajectories wait for the trainer: no session is opened
├── EngineFailed              502  the engine answered with an error
│   └── InvalidEngineReply    502  the engine's answer contradicts itself: none of it is trained
├── Unavailable               503  with Retry-After
│   ├── Overloaded            503  the proxy's bound on connections or bodies is reached, or memory is exhausted
│   ├── StorageUnavailable    503  the storage with the weights cannot be read
│   ├── EngineUnavailable     503  no engine takes traffic
│   │   └── AdapterNotLoaded  503  the engine does not hold the adapter of the call
│   └── StoreUnavailable      503  the database is down or the disk is full
│       ├── StoreContended    503  several proxies wrote the same rows, and retries did not help
│       └── StoreDamaged      503  without Retry-After: somebody must restore a backup
└── EngineTimeout             504
"""

from __future__ import annotations

from typing import Any, ClassVar


class BaseRlError(Exception):
    """The root. `retry_after` is in seconds and becomes the Retry-After header."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def envelope(self) -> dict[str, Any]:
        """Return the body of an error that OpenAI's clients expect."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(BaseRlError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class WeightsRejected(InvalidRequest):
    """A version must not be served. The message is the reason, as the admin page and the log show it."""

    code = "weights_rejected"

    def __init__(self, reason: str, *, param: str = "weights") -> None:
        super().__init__(reason, param=param)


class WeightsMissing(WeightsRejected):
    """Files of a version are missing. They may still appear: network file systems show new files late.
    `is_storage_there`: the folder above the version's exists, so only the version is missing."""

    def __init__(self, reason: str, *, param: str = "weights", is_storage_there: bool = True) -> None:
        super().__init__(reason, param=param)
        self.is_storage_there = is_storage_there


class AuthenticationFailed(BaseRlError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class KeyExpired(AuthenticationFailed):
    code = "expired_api_key"


class PermissionDenied(BaseRlError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(BaseRlError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class PreviousResponseNotFound(NotFound):
    code = "previous_response_not_found"


class Conflict(BaseRlError):
    status = 409
    type = "conflict_error"
    code = "conflict"


class Gone(BaseRlError):
    status = 410
    type = "not_found_error"
    code = "gone"


class RunArchived(Gone):
    """The run is archived: it answers no calls, opens no sessions, and hands out no trajectories."""

    code = "run_archived"

    def __init__(self, run_name: str) -> None:
        super().__init__(
            f"the run {run_name!r} is archived, so it serves nothing: call another run, or bring it back with"
            f" `base-rl runs unarchive {run_name}`"
        )


class NameUsed(Gone):
    code = "session_ended"


class PayloadTooLarge(BaseRlError):
    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class RequestTimedOut(BaseRlError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class HeadersTooLarge(BaseRlError):
    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class RateLimited(BaseRlError):
    """`type` and `code` are the ones that OpenAI's clients recognise."""

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"


class TokensLimited(RateLimited):
    type = "tokens"


class BudgetExhausted(RateLimited):
    type = "insufficient_quota"
    code = "insufficient_quota"


class TooManyBytes(RateLimited):
    code = "too_many_bytes"


class TrainerBehind(RateLimited):
    code = "trainer_behind"


class EngineFailed(BaseRlError):
    status = 502
    type = "upstream_error"
    code = "engine_failed"


class InvalidEngineReply(EngineFailed):
    """`reason` is the fault of the reply, without the name of the engine."""

    code = "invalid_engine_reply"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine sent an invalid reply: {reason}")
        self.reason = reason


class Unavailable(BaseRlError):
    status = 503
    type = "unavailable_error"
    code = "unavailable"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = 2.0) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class Overloaded(Unavailable):
    code = "overloaded"


class StorageUnavailable(Unavailable):
    """The storage with the weights cannot be read now, so whether a version is there is unknown."""

    code = "storage_unavailable"


class EngineUnavailable(Unavailable):
    code = "engine_unavailable"


class AdapterNotLoaded(EngineUnavailable):
    """The engine does not hold the adapter that the call names. Another engine may hold it."""

    code = "adapter_not_loaded"


class StoreUnavailable(Unavailable):
    code = "store_unavailable"


class StoreContended(StoreUnavailable):
    """Several proxies wrote the same rows. A retry may succeed."""


class StoreDamaged(StoreUnavailable):
    """The file of the store is damaged. Sent without Retry-After, because waiting does not repair it."""

    code = "store_damaged"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class EngineTimeout(BaseRlError):
    status = 504
    type = "upstream_error"
    code = "engine_timeout"
