"""Fill a store with the history of a run: a calculator agent that learns, with every state that a page shows."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, insert, update

from proxy.contract.arrays import pack_ids, pack_logprobs
from proxy.contract.claim import TrajectoryAudit
from proxy.contract.identifiers import (
    SessionId,
    new_claim_id,
    new_group_id,
    new_reward_id,
    new_run_id,
    new_session_id,
    new_turn_id,
)
from proxy.database.tables import (
    Base,
    ClaimedSessionRow,
    ClaimRow,
    EventRow,
    GroupRow,
    PolicyVersionRow,
    RewardRow,
    RunRow,
    SessionRow,
    TurnRow,
)
from proxy.database.unit_of_work import Database
from proxy.settings import RunSettings

NOW = 1_790_000_000.0
_ORDER = (ClaimRow, GroupRow, PolicyVersionRow, SessionRow, TurnRow, RewardRow, ClaimedSessionRow, EventRow)
"""Tables whose rows refer to those of tables before them."""
CALL = "<tool_call>\n{}\n</tool_call>"


async def add_run(database: Database, *, name: str = "calculator", now: float = NOW) -> str:
    """Return an empty run with its version 0, as after the first start."""
    run_id = new_run_id()

    def work(connection: Connection) -> None:
        connection.execute(
            insert(RunRow).values(
                id=run_id,
                name=name,
                state="active",
                base_model="agents_examples/calculator/checkpoint",
                config=RunSettings(name=name, model="x").stored,
                head_version=0,
                serving_version=0,
                created_at=now,
            )
        )
        connection.execute(insert(PolicyVersionRow).values(_version_row(run_id, 0, now)))
        connection.execute(
            insert(EventRow).values(run_id=run_id, kind="run.created", data={"name": name}, created_at=now)
        )

    await database.commit(work)
    return run_id


async def add_history(
    database: Database, run_id: str, *, steps: int = 12, per_step: int = 32, now: float = NOW, seconds: float = 100.0
) -> None:
    """Write `steps` committed versions of `per_step` sessions each, then sessions in every other state, up to
    `now`."""
    history = _History(run_id, begin=now - seconds, seconds=seconds, steps=steps, per_step=per_step)
    await database.commit(history.write)


async def add_session(
    database: Database, run_id: str, *, now: float, reward: float | None = None, **values: Any
) -> str:
    """Write a session with one turn; with a reward, it is ended and rewarded."""
    session_id = new_session_id()

    def write(connection: Connection) -> None:
        row = _session_row(run_id, session_id, created_at=now - 1, ended_at=now if reward is not None else None)
        row |= {"reward": reward, "training": "ready" if reward is not None else "pending", "last_active_at": now}
        connection.execute(insert(SessionRow).values(row | {"turn_count": 1} | values))
        connection.execute(
            insert(TurnRow), _turns(random.Random(1), run_id, session_id, now - 1, now, 0, good=True)[:1]
        )
        if reward is not None:
            connection.execute(insert(RewardRow).values(_reward_row(run_id, session_id, reward, now)))
        connection.execute(
            insert(EventRow).values(
                run_id=run_id, kind="session.ended", data={"session_id": session_id}, created_at=now
            )
        )

    await database.commit(write)
    return session_id


class _History:
    """Draws the rows one by one and inserts those of a table together: statements, not rows, take the time."""

    def __init__(self, run_id: str, *, begin: float, seconds: float, steps: int, per_step: int) -> None:
        self._run_id = run_id
        self._begin = begin
        self._step_seconds = seconds / (steps + 1)
        self._steps = steps
        self._per_step = per_step
        self._random = random.Random(7)
        self._rows: dict[type[Base], list[dict[str, Any]]] = {table: [] for table in _ORDER}

    def write(self, connection: Connection) -> None:
        for step in range(self._steps):
            self._add_step(step)
        self._add_rest()
        for table, rows in self._rows.items():
            # Rows that are inserted together must name the same columns.
            for _, alike in itertools.groupby(rows, key=lambda row: row.keys()):
                connection.execute(insert(table), list(alike))
        head = {"head_version": self._steps, "serving_version": self._steps}
        connection.execute(update(RunRow).where(RunRow.id == self._run_id).values(head))

    def _add_step(self, step: int) -> None:
        """Add sessions, mostly sampled from version `step`, that version `step + 1` consumed."""
        start = self._begin + step * self._step_seconds
        end = start + self._step_seconds
        claim_id = new_claim_id()
        chance = 0.12 + 0.84 / (1 + 2.718 ** (-(step - self._steps * 0.4) * 9 / self._steps))
        self._rows[ClaimRow].append(
            {
                "id": claim_id,
                "run_id": self._run_id,
                "trainer": "trainer-1",
                "state": "committed",
                "base_version": step,
                "created_at": end - 1,
                "lease_expires_at": end + 119,
                "committed_version": step + 1,
            }
        )
        audit = []
        for position in range(self._per_step):
            at = start + (position + 1) * self._step_seconds / (self._per_step + 1)
            if position % 8 == 0:
                group_id = self._add_group(step * self._per_step + position, at)
            good = self._random.random() < chance
            behind = min(step, self._random.choice((0, 0, 1, 1, 2)))
            trained = {"group_id": group_id, "training": "consumed", "reward": float(good), "consumed_by": step + 1}
            trained |= {"ready_at": at, "claim_id": claim_id}
            session_id = self._add_session(trained, at=at, version=step - behind, good=good)
            reward = _reward_row(self._run_id, session_id, float(good), at)
            self._rows[RewardRow].append(reward)
            self._rows[ClaimedSessionRow].append(
                {
                    "claim_id": claim_id,
                    "session_id": session_id,
                    "position": position,
                    "reward": float(good),
                    "reward_ids": [reward["id"]],
                    "turn_count": 1,
                }
            )
            audit.append(self._audit(session_id, float(good), chance, behind))
        metrics = {
            "loss": self._random.gauss(0.02, 0.01),
            "grad_norm": abs(self._random.gauss(0.8, 0.2)),
            "entropy": 1.2 - chance,
            "clipped_share": 0.02,
            "learning_rate": 3e-3,
            "step_seconds": 1.1 + self._random.random() * 0.3,
        }
        self._rows[PolicyVersionRow].append(
            _version_row(self._run_id, step + 1, end, parent=step, latest=step + 1 == self._steps)
            | {"claim_ids": [claim_id], "metrics": metrics, "audit": msgspec.to_builtins(audit)}
        )
        for kind in ("version.committed", "version.served"):
            event = {"run_id": self._run_id, "kind": kind, "data": {"version": step + 1}, "created_at": end}
            self._rows[EventRow].append(event)

    def _add_rest(self) -> None:
        """Add sessions that are not trained yet, or never will be."""
        now = self._begin + (self._steps + 1) * self._step_seconds
        states: Sequence[tuple[str, dict[str, Any]]] = (
            ("ready", {"reward": 1.0}),
            ("ready", {"reward": 0.0}),
            ("ready", {"reward": 1.0}),
            ("pending", {"state": "open", "ended_at": None, "end_reason": None}),
            ("pending", {"state": "open", "ended_at": None, "end_reason": None, "attributed_by": "conversation"}),
            ("pending", {"end_reason": "idle"}),
            ("stale", {"reward": 0.0, "oldest_version": 0}),
            ("expired", {}),
            ("excluded", {"purpose": "eval", "reward": 1.0}),
            ("excluded", {"outcome": "failed", "end_reason": "explicit"}),
        )
        for index, (training, values) in enumerate(states):
            at = now - (len(states) - index) * 0.4
            changed = {"training": training, "ready_at": at if training == "ready" else None} | values
            good = bool(values.get("reward"))
            session_id = self._add_session(changed, at=at, version=self._steps, good=good)
            if "reward" in values:
                self._rows[RewardRow].append(_reward_row(self._run_id, session_id, values["reward"], at))

    def _add_group(self, number: int, at: float) -> str:
        group_id = new_group_id()
        values = {"id": group_id, "run_id": self._run_id, "name": f"task-{number // 8}", "size": 8, "created_at": at}
        self._rows[GroupRow].append(values)
        return group_id

    def _add_session(self, values: dict[str, Any], *, at: float, version: int, good: bool) -> str:
        session_id = new_session_id()
        row = _session_row(self._run_id, session_id, created_at=at - 1.4, ended_at=at)
        self._rows[SessionRow].append(row | {"oldest_version": version, "newest_version": version} | values)
        self._rows[TurnRow] += _turns(self._random, self._run_id, session_id, at - 1.4, at, version, good=good)
        return session_id

    def _audit(self, session_id: SessionId | str, reward: float, mean: float, behind: int) -> TrajectoryAudit:
        return TrajectoryAudit(
            session_id=SessionId(session_id),
            reward=reward,
            advantage=reward - mean,
            trained_tokens=38 + self._random.randrange(20),
            staleness_mean=float(behind),
            staleness_max=behind,
            logprob_gap_mean=1e-6,
            logprob_gap_max=4e-6,
            ratio_min=0.82,
            ratio_median=1.0,
            ratio_max=1.19,
            clipped_share=0.03,
        )


def _version_row(
    run_id: str, version: int, at: float, *, parent: int | None = None, latest: bool = True
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "version": version,
        "parent_version": parent,
        "state": "serving" if latest else "retired",
        "weights_uri": f"/data/weights/{version:06d}" if version else None,
        "weights_format": "huggingface" if version else None,
        "weights_sha256": f"{version:064x}" if version else None,
        "weights_bytes": 1_468_928 if version else None,
        "claim_ids": [],
        "config_hash": "c0ffee" if version else None,
        "seed": 1 if version else None,
        "metrics": {},
        "audit": [],
        "created_at": at,
        "served_at": at + 0.08,
        "swap_seconds": 0.021 if version else None,
    }


def _session_row(run_id: str, session_id: str, *, created_at: float, ended_at: float | None) -> dict[str, Any]:
    return {
        "id": session_id,
        "run_id": run_id,
        "task": "(17 + 25) * 3",
        "purpose": "train",
        "metadata": {"difficulty": "easy"},
        "attributed_by": "created",
        "state": "ended" if ended_at is not None else "open",
        "training": "pending",
        "end_reason": "reward" if ended_at is not None else None,
        "turn_count": 3,
        "oldest_version": 0,
        "newest_version": 0,
        "created_at": created_at,
        "last_active_at": ended_at or created_at,
        "ended_at": ended_at,
        "ready_at": ended_at,
    }


def _reward_row(run_id: str, session_id: str, value: float, at: float) -> dict[str, Any]:
    return {
        "id": new_reward_id(),
        "run_id": run_id,
        "session_id": session_id,
        "name": "reward",
        "value": value,
        "source": "checker",
        "after_training": False,
        "created_at": at,
    }


def _turns(
    rng: random.Random, run_id: str, session_id: str, start: float, end: float, version: int, *, good: bool
) -> list[dict[str, Any]]:
    """Write a session of several turns: system and question, a tool call, another one, the answer."""
    question: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a calculator. Use the tools, then answer with the number alone."},
        {"role": "user", "content": "What is (17 + 25) * 3?"},
    ]
    calls = [
        ("add", {"a": 17, "b": 25}, "42"),
        ("multiply", {"a": 42, "b": 3 if good else 2}, "126" if good else "84"),
    ]
    rows: list[dict[str, Any]] = []
    added, parent, path = question, None, 0
    width = (end - start) / 3
    for ordinal in range(3):
        if ordinal < 2:
            name, arguments, result = calls[ordinal]
            text = CALL.format(json.dumps({"name": name, "arguments": arguments}))
            call = {"index": 0, "name": name, "arguments": json.dumps(arguments)}
            message: dict[str, Any] = {"text": "", "tool_calls": [{"id": f"call_{ordinal}", "call": call}]}
            following: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": f"call_{ordinal}", "content": result}]
        else:
            text, message, following = result, {"text": result}, []
        output = [ord(character) for character in text]
        prompt = list(range(40 if ordinal == 0 else 12))
        turn_id = new_turn_id()
        rows.append(
            {
                "id": turn_id,
                "run_id": run_id,
                "session_id": session_id,
                "ordinal": ordinal,
                "parent_id": parent,
                "prefix_tokens": path,
                "prompt_ids": pack_ids(prompt),
                "output_ids": pack_ids(output),
                "output_logprobs": pack_logprobs([-abs(rng.gauss(0, 0.5)) for _ in output]),
                "spans": [[version, 0, len(output)]],
                "sampling": {"max_new_tokens": 256, "temperature": 1.0, "top_p": 1.0},
                "finish_reason": "tool_calls" if ordinal < 2 else "stop",
                "continuation": "new" if ordinal == 0 else "exact",
                "state": "complete",
                "attributed_by": "key",
                "conversation_hash": rng.randbytes(16),
                "tools_hash": bytes(16),
                "prompt_token_count": path + len(prompt),
                "messages": added,
                "request": {"model": "calculator", "temperature": 1.0, "tools": [{"type": "function"}]},
                "response": {"turn_id": turn_id, "choices": [{"turn_id": turn_id, **message}]},
                "started_at": start + ordinal * width,
                "first_token_at": start + ordinal * width + 0.03,
                "finished_at": start + (ordinal + 1) * width - 0.01,
            }
        )
        parent, added, path = turn_id, following, path + len(prompt) + len(output)
    return rows
