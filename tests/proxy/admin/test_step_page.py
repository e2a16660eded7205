"""The page of a step that shows its inputs, and has tokens to colour."""

from __future__ import annotations

import re

import msgspec
import pytest
from sqlalchemy import Connection, insert, select, update

from proxy.auth.service import PrincipalKind
from proxy.contract.arrays import pack_ids, pack_logprobs, unpack_ids
from proxy.contract.identifiers import SessionId
from proxy.contract.step import Fit, StepConditions, StepInputs
from proxy.database.tables import PolicyVersionRow, SessionRow, TokenAuditRow, TurnRow
from proxy.versions.withdrawal_repository import WithdrawalRepository
from tests.fakes.run_history import NOW
from tests.proxy.overview.site import ORIGIN, Site

CONDITIONS = dict.fromkeys(("trainer", "torch", "transformers", "python", "machine", "device", "device_name"), "told")


async def sampled_step(site: Site, run_id: str) -> str:
    """Version 6 with inputs and the tokens of one turn; returns the text of its first token. Its weights are
    removed."""
    inputs = StepInputs(
        config={"optimizer": {"learning_rate": 0.125}},
        algorithm={},
        conditions=StepConditions(**CONDITIONS, threads=3, ranks=2),
        trained_claim=None,
        optimizer_steps=5,
        fresh_optimizer=False,
    )
    of_step = (PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == 6)

    def audited(connection: Connection) -> str:
        connection.execute(
            update(PolicyVersionRow)
            .where(*of_step)
            .values(inputs=msgspec.to_builtins(inputs), weights_removed_at=NOW - 60, metrics={"loss": None})
        )
        turn = connection.execute(
            select(TurnRow.id, TurnRow.session_id, TurnRow.output_ids)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(SessionRow.consumed_by == 6)
            .limit(1)
        ).one()
        count = len(unpack_ids(turn.output_ids))
        connection.execute(
            insert(TokenAuditRow).values(
                run_id=run_id,
                version=6,
                turn_id=turn.id,
                session_id=turn.session_id,
                logprobs=pack_logprobs([-1.0] * count),
                engine_logprobs=pack_logprobs([-1.0 - index for index in range(count)]),
                advantages=pack_logprobs([-0.5] * count),
                staleness=pack_ids([0] * count),
                clipped=bytes(count),
            )
        )
        return str(turn.session_id)

    return await site.database.commit(audited)


@pytest.mark.parametrize(("by", "style"), [("", "h8"), ("?by=gap", "h8"), ("?by=advantage", "d8")])
async def test_tokens_are_coloured_and_the_conditions_are_shown(site: Site, run_id: str, by: str, style: str) -> None:
    key = await site.credentials.create(PrincipalKind.ADMIN)
    await site.client.post("/admin/login", data={"key": key.text}, headers={"origin": ORIGIN})
    session = await sampled_step(site, run_id)
    reply = await site.client.get(f"/admin/runs/calculator/steps/6{by}")
    assert reply.status_code == 200
    page = reply.text
    assert f'id="tokens-{session}"' in page
    assert re.search(rf'<span class="{style}" title="[^"]*log-probability -1 in the trainer', page)
    assert "base-rl replay calculator 6 --verify" in page
    assert "0.125" in page
    assert "deleted" in page
    assert len(re.findall(r'aria-current="true"', page)) == 1


async def test_a_fitted_version_is_not_offered_to_be_replayed(site: Site, run_id: str) -> None:
    key = await site.credentials.create(PrincipalKind.ADMIN)
    await site.client.post("/admin/login", data={"key": key.text}, headers={"origin": ORIGIN})
    await sampled_step(site, run_id)
    of_step = (PolicyVersionRow.run_id == run_id, PolicyVersionRow.version == 6)

    def work(connection: Connection) -> None:
        inputs = connection.execute(select(PolicyVersionRow.inputs).where(*of_step)).scalar_one()
        assert inputs is not None
        fit = Fit(kind="sft", options={}, sessions=(SessionId("ses_1"), SessionId("ses_2")), epochs=1, steps=1)
        values = {"inputs": {**inputs, "fit": msgspec.to_builtins(fit)}, "state": "retired"}
        connection.execute(update(PolicyVersionRow).where(*of_step).values(values))

    await site.database.commit(work)
    page = (await site.client.get("/admin/runs/calculator/steps/6")).text
    assert "base-rl replay" not in page
    assert "Fitted by <code>base-rl fit sft</code> to 2 sessions" in page
    assert "first served" in page
    assert "served since" not in page


async def test_a_rejected_version_is_shown_with_its_reason(site: Site, run_id: str) -> None:
    key = await site.credentials.create(PrincipalKind.ADMIN)
    await site.client.post("/admin/login", data={"key": key.text}, headers={"origin": ORIGIN})
    await site.database.commit(
        lambda connection: WithdrawalRepository(connection).reject(run_id, 6, "w <b>is not finite</b>", now=NOW)
    )
    page = (await site.client.get("/admin/runs/calculator/steps/6")).text
    assert "<b>Rejected</b>, so no engine loads it: w &lt;b&gt;is not finite" in page
    listed = (await site.client.get("/admin/runs/calculator")).text
    assert re.search(r'title="w &lt;b&gt;is not finite[^"]*">rejected</span>', listed)
