"""Request fields that OpenAI's dialects share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from proxy.calls.call import RequestedSampling
from proxy.errors import InvalidRequest

_MOST_STOPS = 16  # OpenAI allows 4. Every new piece of text is searched for each of them, so there is a limit
_STOP: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": _MOST_STOPS},
        {"type": "null"},
    ]
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SamplingFields(BaseModel):
    """OpenAI's sampling parameters, plus `top_k` and `min_p` from open inference engines. Null counts as absent."""

    # Strict: a number as text, or 1 for true, is an error of the client that should not go unnoticed.
    model_config = ConfigDict(strict=True)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)  # engines read it as a signed 64-bit integer
    stop: Annotated[list[str] | None, BeforeValidator(_as_list), WithJsonSchema(_STOP)] = Field(
        default=None, max_length=_MOST_STOPS
    )
    logit_bias: dict[str, float] | None = None

    def requested(self, max_new_tokens: int | None) -> RequestedSampling:
        """Return the sampling that the body asks for, with at most `max_new_tokens` new tokens.

        Raise InvalidRequest if a stop string is empty or `logit_bias` is invalid.
        """
        for index, stop in enumerate(self.stop or ()):
            if not stop:
                raise InvalidRequest("a stop string must not be empty", param=f"stop[{index}]")
        return RequestedSampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k or None,  # 0 means "all tokens", like absent
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=tuple(self.stop or ()),
            logit_bias=_logit_bias(self.logit_bias),
        )


def _logit_bias(bias: dict[str, float] | None) -> dict[str, float] | None:
    for token, value in (bias or {}).items():
        if not token.isascii() or not token.isdigit():
            raise InvalidRequest(f"the keys of logit_bias must be token ids, not {token!r}", param="logit_bias")
        if not -100 <= value <= 100:
            raise InvalidRequest("a bias must be between -100 and 100", param=f"logit_bias.{token}")
    return bias or None
