"""The page on webhooks: its receiver accepts what is sent, and its table has every event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from proxy.webhooks.messages import KNOWN_EVENTS
from tests.docs.markdown import ROOT, code, code_blocks, rows
from tests.proxy.outbound.targets import Received
from tests.proxy.webhooks.world import Webhooks

PAGE = (ROOT / "docs" / "webhooks.md").read_text()

IsGenuine = Callable[[dict[str, str], bytes, str], bool]


@pytest.fixture
def is_genuine(webhooks: Webhooks) -> IsGenuine:
    webhooks.clock.now = time.time()
    (block,) = code_blocks(PAGE, "python")
    names: dict[str, Any] = {}
    exec(compile(block, "docs/webhooks.md", "exec"), names)
    found: IsGenuine = names["is_genuine"]
    return found


async def received(webhooks: Webhooks) -> Received:
    """Return a request that was sent now."""
    await webhooks.happen("run.paused", reason="ü")
    await webhooks.deliver()
    return webhooks.received[-1]


async def test_the_receiver_of_the_page_accepts_a_message_and_no_other(
    webhooks: Webhooks, is_genuine: IsGenuine
) -> None:
    made = await webhooks.create("*")
    request = await received(webhooks)
    assert is_genuine(request.headers, request.body, made.secret)
    other = await webhooks.service.rotate(made.webhook.id, grace_seconds=60.0)
    assert not is_genuine(request.headers, request.body, other.secret)
    assert not is_genuine(request.headers, request.body + b" ", made.secret)
    assert not is_genuine({**request.headers, "webhook-id": "msg_other"}, request.body, made.secret)
    old = str(int(time.time()) - 301)
    assert not is_genuine({**request.headers, "webhook-timestamp": old}, request.body, made.secret)


async def test_the_receiver_of_the_page_accepts_both_secrets_during_a_rotation(
    webhooks: Webhooks, is_genuine: IsGenuine
) -> None:
    made = await webhooks.create("*")
    rotated = await webhooks.service.rotate(made.webhook.id, grace_seconds=60.0)
    request = await received(webhooks)
    for secret in (made.secret, rotated.secret):
        assert is_genuine(request.headers, request.body, secret)


def test_the_page_has_every_event_and_no_other() -> None:
    table = PAGE.split("The events:\n\n")[1].split("\n\n")[0]
    assert sorted(kind for cells in rows(table) for kind in code(cells[1])) == list(KNOWN_EVENTS)
