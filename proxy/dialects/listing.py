"""Models as `/v1/models` lists them, before a dialect writes them."""

from __future__ import annotations

from typing import Any

import msgspec


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name that a key can ask for. `created` is in seconds since the epoch; `context_length` in tokens, None while
    the model has not been loaded."""

    name: str
    created: int
    context_length: int | None

    @property
    def entry(self) -> dict[str, Any]:
        """The model in OpenAI's form."""
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "base-rl"}
