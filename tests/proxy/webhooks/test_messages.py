"""Messages, subscriptions and secrets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import proxy
from proxy.outbound.secrets import SigningSecrets
from proxy.webhooks.messages import (
    KNOWN_EVENTS,
    Message,
    is_event_name,
    is_known,
    iso_time,
    message_id,
    payload_of,
    subscribes,
)


@pytest.mark.parametrize("name", ["*", "version", "version.committed", *KNOWN_EVENTS])
def test_a_kind_a_domain_and_all_name_events(name: str) -> None:
    assert is_event_name(name)
    assert is_known(name)


@pytest.mark.parametrize(
    "name", ["", "Version", "version.", ".committed", "version.*", "a b", "a" * 49, "version.x.y"]
)
def test_other_texts_name_no_event(name: str) -> None:
    assert not is_event_name(name)


def test_the_known_events_are_appended_somewhere() -> None:
    source = "\n".join(
        file.read_text() for file in Path(proxy.__path__[0]).rglob("*.py") if file.name != "messages.py"
    )
    # Some kinds are put together from their domain and a state.
    stale = [kind for kind in KNOWN_EVENTS if f'"{kind}"' not in source and kind.partition(".")[0] not in ("claim",)]
    assert stale == []
    assert tuple(sorted(set(KNOWN_EVENTS))) == KNOWN_EVENTS


def test_a_webhook_sends_what_it_subscribes_to_and_no_events_of_deliveries() -> None:
    assert subscribes(["version"], "version.committed", {})
    assert subscribes(["run.paused", "version.committed"], "version.committed", {})
    assert subscribes(["*"], "job.dead", {"kind": "judge"})
    assert not subscribes(["version.served", "versio"], "version.committed", {})
    assert not subscribes(["*", "job.dead"], "job.dead", {"kind": "webhook"})


def test_an_event_that_is_too_large_is_sent_without_its_data() -> None:
    message = Message(type="a.b", timestamp=iso_time(0.0), run="r", run_id="run_1", data={"x": "y" * (64 << 10)})
    body = json.loads(payload_of("whk_1", "msg_1", message)["body"])
    assert body == {
        "type": "a.b",
        "timestamp": "1970-01-01T00:00:00.000Z",
        "run": "r",
        "run_id": "run_1",
        "data": None,
    }


def test_ids_of_messages_differ_between_webhooks() -> None:
    assert message_id("whk_a", "1") == "msg_a_1"
    assert message_id("whk_b", "1") != message_id("whk_a", "1")


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_each_generation_has_a_secret_of_its_own(one: int, other: int) -> None:
    secrets = SigningSecrets(b"a" * 32)
    assert re.fullmatch(r"whsec_[A-Za-z0-9+/]{43}=", secrets.text("whk_1", one))
    assert (secrets.text("whk_1", one) == secrets.text("whk_1", other)) == (one == other)
    assert secrets.text("whk_1", one) != secrets.text("whk_2", one)
    assert secrets.text("whk_1", one) != SigningSecrets(b"b" * 32).text("whk_1", one)


def test_an_installation_is_recognised_by_its_secret_alone() -> None:
    assert SigningSecrets(b"a" * 32).fingerprint == SigningSecrets(b"a" * 32).fingerprint
    assert SigningSecrets(b"a" * 32).fingerprint != SigningSecrets(b"b" * 32).fingerprint
    assert SigningSecrets(None).fingerprint is None
