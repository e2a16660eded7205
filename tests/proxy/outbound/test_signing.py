"""Signatures by the scheme of Standard Webhooks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.outbound.signing import secret_text, signature, signed_headers


def test_the_signature_of_the_schemes_own_example() -> None:
    signed = signature(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        event_id="msg_p5jXN8AQM9LWM0D4loKWxJek",
        timestamp=1614265330,
        body=b'{"test": 2432232314}',
    )
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@given(st.lists(st.binary(min_size=24, max_size=64), max_size=3), st.binary(max_size=100))
def test_each_secret_signs(keys: list[bytes], body: bytes) -> None:
    secrets = [secret_text(key) for key in keys]
    headers = signed_headers(secrets, event_id="msg_1", timestamp=5, body=body)
    expected = [signature(secret, event_id="msg_1", timestamp=5, body=body) for secret in secrets]
    assert headers.get("webhook-signature", "").split() == expected
