"""Rows in which a prefix that sequences share stands once, and the cost that decides who shares a row.

A row is a forest of token trees in preorder: what follows a token in its tree stands right behind it, up to the
token's `reach`. So token i sees token j where j ≤ i < reach[j], which is j = i and its ancestors, and a position is a
depth. Sequences of one row that share nothing are trees of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MASKED_PARITY = 1024
"""Tokens of a row at which attention under a mask costs as much as all the rest of a layer. Half of that without a
mask. Both as measured on CPUs with models of 0.4 to 6 million parameters; larger models have it further out."""
MICRO_BATCH_TOKENS = 64
"""What a further micro-batch costs by itself, in tokens of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """`members` are indices of sequences; token p of the i-th one stands at `places[i][p]`. `branched`: some tokens
    do not see all that stand before them."""

    members: tuple[int, ...]
    places: tuple[Sequence[int], ...]
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    reach: tuple[int, ...]
    branched: bool

    def __len__(self) -> int:
        return len(self.ids)


def single_row(sequences: Sequence[Sequence[int]], members: Sequence[int]) -> Row:
    """These one behind the other, nothing shared."""
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
    """These, in lexicographic order, with every shared prefix once."""
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
    """The rows that cost least, of `max_tokens` at most unless it is one sequence. Neighbours in lexicographic order
    share the most, so each row takes a run of them; a long prefix stands in several rows once a row has so many
    branches that attention to all of them costs more than the prefix does."""
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
    """Rows of similar length together, padded to at most `max_tokens` unless it is one row, so that padding and
    micro-batches together cost least. Rows that need a mask are apart from those that do not."""
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
    """How many tokens two sequences begin with alike."""
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
    """The partition of 0 … count − 1 into runs whose costs sum to the least. `costs(last)` are those of the runs that
    end with `last`, of one, two, … members, as far as they may be that long."""
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
