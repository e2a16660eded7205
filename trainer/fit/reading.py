"""Reading the data of a fit, from any source: sessions or preferences of the proxy or of an export, or rows of
files."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from proxy.contract.policy import Head
from proxy.contract.step import FittedFile
from trainer.errors import NothingToFit
from trainer.fit.options import KTO, REWARD_MODEL, SFT
from trainer.fit.records import Selection, examples_of, held_out, labelled_of, lines_of, pairs_of
from trainer.fit.rendering import Renderer, context_of
from trainer.fit.rows import OfFiles, read_files
from trainer.proxy_client import ProxyClient

_LIGHTEST, _HEAVIEST = 1.0, 4 / 3
"""The range that the KTO paper gives for (weight × count of desirable) / (weight × count of undesirable examples)."""

_log = structlog.get_logger("trainer.fit")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The data of a fit. `learnt` and `held_out` are of one kind: examples, labelled examples or pairs. `dropped`
    counts items that cannot be learnt from, by reason. `files` are the files of the rows."""

    learnt: Sequence[Any]
    held_out: Sequence[Any]
    dropped: Mapping[str, int] = field(default_factory=dict)
    files: tuple[FittedFile, ...] = ()


def read(options: argparse.Namespace, client: ProxyClient, head: Head, base: Path, vocabulary: int) -> Found:
    """Read the items to learn from and the items to hold out. Raises NothingToFit if there are too few."""
    found = _of_files(options, head, base, vocabulary) if options.data else _of_records(options, client, vocabulary)
    dropped = {reason: count for reason, count in sorted(found.dropped.items()) if count}
    what = named(options.kind, of_files=bool(options.data))
    if dropped:
        _log.warning(f"{what} that cannot be learnt from are left out", **dropped)
    learnt, rest = held_out(found.items, options.held_out)
    if not learnt:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none was left out"
        raise NothingToFit(f"no {what} to learn from were found ({reasons})")
    if options.kind == KTO:
        _check_labels(options, found.items)
    return Found(learnt=learnt, held_out=rest, dropped=dropped, files=found.files)


def named(kind: str, *, of_files: bool) -> str:
    """Return the name of a kind's examples, for people."""
    if of_files:
        return "rows"
    return "sessions" if kind in (SFT, KTO) else "preferences"


def _of_files(options: argparse.Namespace, head: Head, base: Path, vocabulary: int) -> OfFiles:
    return read_files(options.kind, options.data, Renderer(base, context_of(head, base)), vocabulary)


def _of_records(options: argparse.Namespace, client: ProxyClient, vocabulary: int) -> OfFiles:
    names = ("version", "min_reward", "task", "source")
    chosen = tuple(options.session) if getattr(options, "session", None) else None
    selection = Selection(
        since=options.since,
        until=options.until,
        sessions=chosen,
        **{name: getattr(options, name, None) for name in names},
    )
    lines = _from_proxy(options, client, selection) if options.from_ is None else lines_of(options.from_)
    counts: dict[str, int] = {}
    items: tuple[Any, ...]
    if options.kind == SFT:
        sessions = examples_of(lines, selection, vocabulary)
        items, counts["no_tokens_of_the_model"] = sessions.examples, sessions.dropped
    elif options.kind == KTO:
        labels = labelled_of(lines, selection, vocabulary, options.threshold)
        items, counts["no_reward"] = labels.labelled, labels.without_reward
        counts["no_tokens_of_the_model"] = labels.dropped - labels.without_reward
    else:
        pairs = pairs_of(lines, selection, vocabulary, last_alone=options.kind == REWARD_MODEL)
        items, counts["no_tokens_of_the_model"] = pairs.pairs, pairs.dropped
    return OfFiles(items=items, dropped=Counter(counts))


def _from_proxy(options: argparse.Namespace, client: ProxyClient, selection: Selection) -> Iterator[bytes]:
    of_sessions = options.kind in (SFT, KTO)
    path = "/export" if of_sessions else "/export/preferences"
    return client.lines(path, selection.query(of_sessions=of_sessions))


def _check_labels(options: argparse.Namespace, items: Sequence[Any]) -> None:
    """Refuse a single example, and warn of labels by which one kind would outweigh the other."""
    good = sum(item.desirable for item in items)
    bad = len(items) - good
    if len(items) < 2:
        raise NothingToFit("kto compares answers with those to other prompts: it needs two examples at least")
    if not good or not bad:
        _log.warning(f"all examples are {'desirable' if good else 'undesirable'}: nothing tells good from bad")
        return
    ratio = options.desirable_weight * good / (options.undesirable_weight * bad)
    if not _LIGHTEST <= ratio <= _HEAVIEST:
        _log.warning(
            "desirable and undesirable examples weigh unevenly: the ratio of weighted counts should be 1 to 4/3",
            desirable=good,
            undesirable=bad,
            ratio=round(ratio, 3),
            try_desirable_weight=round(options.undesirable_weight * bad / good, 3),
        )
