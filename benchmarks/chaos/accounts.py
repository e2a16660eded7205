"""Compare the store, read directly from the database, with what clients were promised."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.chaos.customers import Promises
from proxy.contract.arrays import unpack_ids, unpack_logprobs
from proxy.database.packed_json import unpack_json

_ROUNDING = 1e-3
"""Largest log-probability above 0 that float32 arithmetic may produce."""

Ask = Callable[[str], Sequence[tuple[Any, ...]]]


def asking_sqlite(file: Path) -> Ask:
    def ask(query: str) -> Sequence[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query).fetchall()

    return ask


def asking_postgresql(url: str) -> Ask:
    def ask(query: str) -> Sequence[tuple[Any, ...]]:
        with psycopg.connect(url) as connection:
            return connection.execute(query.encode()).fetchall()

    return ask


def trainable(ask: Ask) -> set[str]:
    """Count the sessions that a trainer has or may get."""
    return {row[0] for row in ask("SELECT id FROM sessions WHERE training IN ('ready', 'leased')")}


def impossible(ask: Ask, vocabulary: int) -> int:
    """Return the number of completed turns with values that no model produces: a lie of the engine that was
    believed."""
    count = 0
    for ids, logprobs in ask("SELECT output_ids, output_logprobs FROM turns WHERE state <> 'failed'"):
        tokens, said = unpack_ids(bytes(ids)), unpack_logprobs(bytes(logprobs))
        count += not (
            len(tokens) == len(said)
            and all(0 <= token < vocabulary for token in tokens)
            and all(math.isfinite(value) and value < _ROUNDING for value in said)
        )
    return count


def counted(ask: Ask, promises: Promises) -> dict[str, int]:
    """Return the figures. All but the first five count broken promises."""
    turns = {row[0]: unpack_json(bytes(row[1])) for row in ask("SELECT id, response FROM turns")}
    rewards = {row[0]: float(row[1]) for row in ask("SELECT id, value FROM rewards")}
    committed = Counter(
        row[0]
        for row in ask(
            "SELECT session_id FROM claimed_sessions JOIN claims ON claims.id = claim_id"
            " WHERE claims.state = 'committed'"
        )
    )
    consumed = {row[0] for row in ask("SELECT id FROM sessions WHERE training = 'consumed'")}
    versions: dict[str, list[int]] = {}
    for run_id, version in ask("SELECT run_id, version FROM policy_versions ORDER BY version"):
        versions.setdefault(run_id, []).append(version)
    misaligned = ask(
        "SELECT turns.session_id FROM turns GROUP BY turns.session_id"
        " HAVING count(*) <> (SELECT turn_count FROM sessions WHERE sessions.id = turns.session_id)"
    )
    return {
        "answered_turns": len(promises.turns),
        "acknowledged_rewards": len(promises.rewards),
        "consumed": len(consumed),
        "versions": sum(len(each) - 1 for each in versions.values()),
        "runs_without_a_step": sum(len(each) == 1 for each in versions.values()),
        "lost_turns": sum(turn not in turns for turn in promises.turns),
        "changed_turns": sum(
            turn in turns and recorded_text(turns[turn]) != text for turn, text in promises.turns.items()
        ),
        "lost_rewards": sum(reward not in rewards for reward in promises.rewards),
        "changed_rewards": sum(rewards.get(entry, value) != value for entry, value in promises.rewards.items()),
        "doubled_rewards": sum(first != again for first, again in promises.repeated),
        "consumed_twice": sum(count > 1 for count in committed.values()),
        "consumed_without_a_step": len(consumed - committed.keys()),
        "trained_and_not_consumed": len(committed.keys() - consumed),
        "missing_versions": sum(each != list(range(len(each))) for each in versions.values()),
        "sessions_with_miscounted_turns": len(misaligned),
        "ambiguous_answers": len(promises.overtaken),
    }


def recorded_text(answer: dict[str, Any]) -> str:
    """Return the text and calls of the first choice of a recorded answer, in the form that `customers` uses."""
    choice = answer["choices"][0]
    calls = "".join(f"{made['call']['name']}({_written(made['call'])})" for made in choice.get("tool_calls", ()))
    return f"{choice['text']}{calls}"


def _written(call: dict[str, Any]) -> str:
    arguments = call["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
