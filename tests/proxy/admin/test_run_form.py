from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.run_form import FIELDS, errors_of, merge_patch, settings_of, stored_settings, values_of
from proxy.contract.configuration import merge
from proxy.errors import InvalidRequest
from proxy.settings import RunSettings

VALUES = st.recursive(
    st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda below: st.dictionaries(st.sampled_from("abc"), below, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


def patched(before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a merge patch by the words of RFC 7396."""
    after = dict(before)
    for key, value in patch.items():
        if value is None:
            after.pop(key, None)
        elif isinstance(value, dict):
            old = after.get(key)
            after[key] = patched(old if isinstance(old, dict) else {}, value)
        else:
            after[key] = value
    return after


@given(OBJECTS, OBJECTS)
def test_a_patch_leads_from_one_object_to_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    patch = merge_patch(before, after)
    result = patched(before, patch)
    assert result == after
    assert json.dumps(result, sort_keys=True) == json.dumps(after, sort_keys=True)  # True is not 1
    assert merge_patch(after, after) == {}


SETTINGS = RunSettings.model_validate(
    {
        "name": "r",
        "model": "m",
        "sampling": {"temperature": 0.7},
        "limits": {"calls_per_minute": 60},
        "session_idle_seconds": 12.5,
        "reward_weights": {"format": 0.5},
        "trainer": {"batch": {"trajectories": 8}},
    }
)


def test_a_form_that_is_sent_back_unchanged_changes_nothing() -> None:
    stored = stored_settings(SETTINGS)
    values = values_of(stored)
    assert values["sampling.temperature"] == "0.7"
    assert values["max_new_tokens"] == ""
    assert '"format": 0.5' in values["more"]
    assert merge_patch(stored, settings_of(values)) == {}
    assert stored == stored_settings(SETTINGS)


def test_an_emptied_field_returns_to_its_default() -> None:
    stored = stored_settings(SETTINGS)
    emptied = values_of(stored) | {"limits.calls_per_minute": "", "more": "", "sampling.temperature": "0,5"}
    patch = merge_patch(stored, settings_of(emptied))
    assert patch == {"limits": None, "reward_weights": None, "trainer": None, "sampling": {"temperature": 0.5}}
    left = {key: value for key, value in merge(stored, patch).items() if value is not None}
    assert RunSettings.model_validate(left).limits.calls_per_minute is None


def test_every_field_names_a_setting_and_shows_its_default() -> None:
    defaults = {field.name: field.default for field in FIELDS}
    assert (defaults["sampling.temperature"], defaults["limits.calls_per_minute"]) == ("1", "")
    filled = settings_of({field.name: field.default for field in FIELDS})
    assert RunSettings.model_validate(filled) == RunSettings()


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"sampling.temperature": "warm"}, "sampling.temperature"),
        ({"sampling.temperature": "inf"}, "sampling.temperature"),
        ({"max_new_tokens": "1.5"}, "max_new_tokens"),
        ({"more": "{"}, "more"),
        ({"more": "[1]"}, "more"),
        ({"more": '{"max_new_tokens": 5}', "max_new_tokens": "6"}, "more"),
        ({"more": '{"sampling": 5}', "sampling.temperature": "6"}, "more"),
        ({"more": "[" * 100_000}, "more"),
    ],
)
def test_an_error_belongs_to_its_field(form: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        settings_of(form)
    assert raised.value.param == f"settings.{param}"
    assert list(errors_of(raised.value, frozenset(field.name for field in FIELDS))) == [param]
