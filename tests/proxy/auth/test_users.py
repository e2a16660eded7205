from __future__ import annotations

from typing import Any

import pytest

from proxy.auth.users import users_of

_OLD = "user_abc123_account__session_0f0e-11"
_NEW = '{"device_id":"d1","account_uuid":"a1","session_id":"s1"}'


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, ()),
        ({"model": "m"}, ()),
        ({"user": "ada"}, ("ada",)),
        ({"user": " ada ", "safety_identifier": "ada"}, ("ada",)),
        ({"safety_identifier": "s", "metadata": {"user_id": 7, "user": "u"}}, ("s", "7", "u")),
        ({"metadata": {"user_id": _OLD}}, (_OLD, "user_abc123_account_")),
        ({"metadata": {"user_id": _NEW}}, (_NEW, "a1", "d1")),
        ({"metadata": {"user_id": "{broken"}}, ("{broken",)),
        ({"user": ""}, ()),
        ({"user": "x" * 2001}, ()),
        ({"user": None, "metadata": None}, ()),
        ({"user": True, "metadata": [1]}, ()),
    ],
)
def test_users_are_found_wherever_agents_name_them(body: dict[str, Any], names: tuple[str, ...]) -> None:
    assert users_of(body) == names
