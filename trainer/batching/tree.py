"""Rows that contain a shared prefix of sequences once, and the cost that decides which sequences share a row.

A row is a forest of token trees in preorder: the descendants of a token follow it directly, up to the index in its
`reach`. Token i sees token j if j ≤ i < reach[j], that is itself and its ancestors, and a position is a depth.
Sequences of one row without a common prefix are trees of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MASKED_PARITY = 1024
"""Length of a row, in tokens, at which masked attention costs as much as the rest of a layer; without a mask the
length is twice that. Measured on CPUs with models of 0.4 to 6 million parameters; it grows with the model."""
MICRO_BATCH_TOKENS = 64
"""Fixed cost of a micro-batch, in tokens of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of tokens. `members` are indices of sequences; token p of the i-th member is at index `places[i][p]`.

    `branched` is True if some token does not see all tokens before it.
    """

    members: tuple[int, ...]
    places: tuple[Sequence[int], ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    reach: tuple[int, ...]
    branched: bool

    def __len__(self) -> int:
        return len(self.ids)


def single_row(sequences: Sequence[Sequence[int]], members: Sequence[int]) -> Row:
    """Return a row of these sequences one after another, without shared prefixes."""
    ids: list[int] = []
    positions: list[int] = []
    reach: list[int] = []
    places: list[range] = []
    for member in members:
        sequence = sequences[member]
        places.append(range(len(ids), len(ids) + len(sequence)))
        ids.extend(sequence)
        positions.extend(range(len(sequence)))
        reach.extend([len(ids)] * len(sequence))
    return Row(
        members=tuple(members),
        places=tuple(places),
        ids=tuple(ids),
        positions=tuple(positions),
        reach=tuple(reach),
        branched=len(members) > 1,
    )


def tree_row(sequences: Sequence[Sequence[int]], members: Sequence[int]) -> Row:
    """Return a row of these sequences with every shared prefix once. `members` must be in lexicographic order."""
    ids: list[int] = []
    positions: list[int] = []
    reach: list[int] = []
    places: list[tuple[int, ...]] = []
    branched = False
    path: tuple[int, ...] = ()
    before: Sequence[int] = ()
    for member in members:
        sequence = sequences[member]
        shared = common_prefix(before, sequence)
        if shared < len(before):
            branched = True
            for place in path[shared:]:
                reach[place] = len(ids)
        path = path[:shared] + tuple(range(len(ids), len(ids) + len(sequence) - shared))
        ids.extend(sequence[shared:])
        positions.extend(range(shared, len(sequence)))
        reach.extend([0] * (len(sequence) - shared))
        places.append(path)
        before = sequence
    for place in path:
        reach[place] = len(ids)
    return Row(
        members=tuple(members),
        places=tuple(places),
        ids=tuple(ids),
        positions=tuple(positions),
        reach=tuple(reach),
        branched=branched,
    )


def tree_rows(sequences: Sequence[Sequence[int]], max_tokens: int) -> list[Row]:
    """Return the cheapest rows of at most `max_tokens` tokens each; a longer sequence is a row of its own.

    Neighbours in lexicographic order share the longest prefixes, so every row is a run of them. A long prefix is
    repeated in another row once attention over all branches of one row would cost more than repeating it.
    """
    order = sorted(range(len(sequences)), key=lambda index: (sequences[index], index))
    lengths = [len(sequences[index]) for index in order]
    shared = [0, *(common_prefix(sequences[one], sequences[next_]) for one, next_ in itertools.pairwise(order))]

    def costs(last: int) -> list[float]:
        found = [_row_cost(lengths[last], masked=False)]
        tokens, chain = lengths[last], True
        for first in range(last - 1, -1, -1):
            tokens += lengths[first] - shared[first + 1]
            chain = chain and shared[first + 1] == lengths[first]
            if shared[first + 1] == 0 or tokens > max_tokens:
                break
            found.append(_row_cost(tokens, masked=not chain))
        return found

    return [tree_row(sequences, [order[place] for place in part]) for part in _cheapest(len(order), costs)]


def even_parts(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Put rows of similar length into micro-batches so that padding and micro-batches together cost least.

    A micro-batch has at most `max_tokens` tokens with padding; a longer row is a micro-batch of its own. Rows with
    and without a mask are separate, because one masked row makes attention dearer for all rows of its micro-batch.
    """
    parts: list[list[Row]] = []
    for branched in (False, True):
        kind = sorted((row for row in rows if row.branched is branched), key=len, reverse=True)

        def costs(last: int, kind: Sequence[Row] = kind, branched: bool = branched) -> list[float]:
            found: list[float] = []
            for first in range(last, -1, -1):
                count, width = last + 1 - first, len(kind[first])
                if found and count * width > max_tokens:
                    break
                found.append(count * _row_cost(width, masked=branched) + MICRO_BATCH_TOKENS)
            return found

        parts += [[kind[place] for place in part] for part in _cheapest(len(kind), costs)]
    return parts


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _row_cost(tokens: int, *, masked: bool) -> float:
    return tokens + tokens * tokens / (MASKED_PARITY if masked else 2 * MASKED_PARITY)


def _cheapest(count: int, costs: Callable[[int], Sequence[float]]) -> list[range]:
    """Return the partition of 0 … count − 1 into runs with the least sum of costs, by dynamic programming.

    `costs(last)` lists the costs of the runs of one, two, … members that end with `last`; it stops where a run would
    be too long.
    """
    best = [0.0]
    began: list[int] = []
    for last in range(count):
        totals = [best[last - more] + cost for more, cost in enumerate(costs(last))]
        more = min(range(len(totals)), key=totals.__getitem__)
        best.append(totals[more])
        began.append(last - more)
    parts: list[range] = []
    while count:
        parts.insert(0, range(began[count - 1], count))
        count = began[count - 1]
    return parts
