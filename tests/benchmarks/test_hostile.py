"""Check that the hostile bodies match their names and are accepted by the proxy's bounds on size."""

from __future__ import annotations

import json

from benchmarks.hostile.bodies import MIB, all_bodies

NO_JSON = {"chat: nested lists", "feedback: a comment without end"}


def test_bodies_are_json_of_about_the_requested_size() -> None:
    names = set()
    for name, (path, body) in all_bodies(MIB // 4):
        names.add(name)
        assert path.startswith("/v1/")
        assert len(body) <= 5 * MIB
        if name not in NO_JSON:
            assert isinstance(json.loads(body), dict | list), name
    assert len(names) > 30
