"""The KV cache of the running requests: one slot for each request, and slots are dense from 0.

The token at position p of a slot lies at index p, so a decode step reads `[:rows, :length]` as a view, without a
gather. When a request leaves, the last slot is copied into the hole.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Capacities are multiples of these, so that a growing batch does not copy the cache at every step.
LENGTH_STEP = 64
ROWS_STEP = 8


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one model layer, `[rows, positions, heads, dim]`. `plan` says what the next pass does."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan = plan
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, length = self.plan.rows_capacity, self.plan.length_capacity
        # Zeros, not empty memory: attention reads all slots up to the length of the longest one, and multiplies the
        # values at masked positions by 0, so they must be finite.
        self.keys = key_states.new_zeros((rows, length, key_states.shape[1], key_states.shape[3]))
        self.values = value_states.new_zeros((rows, length, value_states.shape[1], value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values `[batch, heads, time, dim]`; return those that attention reads, in the same
        layout."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        plan = self.plan
        if plan.flat_index is None:
            rows, length = slice(plan.first_row, plan.first_row + key_states.shape[0]), key_states.shape[2]
            self.keys[rows, :length] = key_states.transpose(1, 2)
            self.values[rows, :length] = value_states.transpose(1, 2)
            return key_states, value_states
        for stored, new in ((self.keys, key_states), (self.values, value_states)):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, plan.flat_index, new.squeeze(2))
        rows = slice(0, plan.rows)
        return (
            self.keys[rows, : plan.length].transpose(1, 2),
            self.values[rows, : plan.length].transpose(1, 2),
        )

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another one."""
        for stored in (self.keys, self.values):
            if stored is not None:
                stored[target, :length] = stored[source, :length]

    def resize(self, rows: int, length: int) -> None:
        """Take the plan's capacity; the first `rows` slots retain their first `length` positions."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_zeros((self.plan.rows_capacity, self.plan.length_capacity, *old.shape[2:]))
                new[:rows, :length] = old[:rows, :length]
                setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.plan.length if self.plan.flat_index is not None else query_length), 0

    def get_seq_length(self) -> int:
        return self.plan.length

    def get_max_length(self) -> int:
        return self.plan.length_capacity


class Plan:
    """The capacity, and what the next forward pass does with the cache. With `flat_index` None it is a prefill into
    the rows from `first_row`; otherwise a decode step of `rows` rows, whose new tokens go to these flat positions."""

    def __init__(self) -> None:
        self.rows_capacity = ROWS_STEP
        self.length_capacity = LENGTH_STEP
        self.first_row = 0
        self.rows = 0
        self.length = 0
        self.flat_index: torch.Tensor | None = None


class SlotCache(Cache):
    """The cache object for a transformers model. Its capacity grows with the running requests."""

    def __init__(self, layers: int) -> None:
        self.plan = Plan()
        self.slots = [SlotLayer(self.plan) for _ in range(layers)]
        super().__init__(layers=list(self.slots))

    def reserve(self, rows: int, length: int, *, used_rows: int, used_length: int) -> None:
        """Make room for `rows` slots of `length` positions, and retain the first `used_rows` × `used_length`."""
        plan = self.plan
        if rows <= plan.rows_capacity and length <= plan.length_capacity:
            return
        if length > plan.length_capacity:
            # The number of slots shrinks to the need when the length grows: one long request among a few must not
            # cost as many slots as a former batch of short ones.
            plan.length_capacity = _round_up(max(length, plan.length_capacity * 5 // 4), LENGTH_STEP)
            plan.rows_capacity = _round_up(rows, ROWS_STEP)
        else:
            plan.rows_capacity = _round_up(max(rows, plan.rows_capacity * 5 // 4), ROWS_STEP)
        for layer in self.slots:
            layer.resize(used_rows, used_length)

    def plan_prefill(self, first_row: int, length: int) -> None:
        """Let the next forward pass write `length` positions into the rows from `first_row`."""
        self.plan.flat_index = None
        self.plan.first_row = first_row
        self.plan.length = length

    def plan_decode(self, positions: torch.Tensor, length: int) -> None:
        """Let the next forward pass write one token into each row i at `positions[i]`, and read `length`
        positions."""
        rows = positions.shape[0]
        self.plan.rows = rows
        self.plan.length = length
        self.plan.flat_index = torch.arange(rows, device=positions.device) * self.plan.length_capacity + positions

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot into another one, in all layers."""
        for layer in self.slots:
            layer.move(source, target, length)

    def clear(self) -> None:
        """Release all content and memory."""
        self.plan.rows_capacity = ROWS_STEP
        self.plan.length_capacity = LENGTH_STEP
        for layer in self.slots:
            layer.keys = layer.values = None
            layer.is_initialized = False


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
