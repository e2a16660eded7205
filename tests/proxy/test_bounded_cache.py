from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from proxy.bounded_cache import BoundedCache

_STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "put", "drop", "clear"]), st.integers(0, 5), st.integers(1, 6)), max_size=60
)


@given(steps=_STEPS, most=st.integers(0, 12), weighs=st.booleans())
def test_it_keeps_the_most_recently_used_entries_up_to_its_bound(
    steps: list[tuple[str, int, int]], most: int, weighs: bool
) -> None:
    evicted: list[tuple[int, int]] = []
    cache: BoundedCache[int, int] = BoundedCache(
        most, weigh=(lambda value: value) if weighs else None, evicted=lambda key, value: evicted.append((key, value))
    )
    model: OrderedDict[int, int] = OrderedDict()
    gone: list[tuple[int, int]] = []
    for action, key, value in steps:
        if action == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        elif action == "put":
            model.pop(key, None)
            model[key] = value
            cache.put(key, value)
            while sum(model.values()) > most if weighs else len(model) > most:
                gone.append(model.popitem(last=False))
        elif action == "drop":
            model.pop(key, None)
            cache.drop(key)
        else:
            model.clear()
            cache.clear()
        assert list(cache.items()) == list(model.items())
        assert (len(cache), key in cache) == (len(model), key in model)
    assert evicted == gone
