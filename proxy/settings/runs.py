"""The runs that a configuration declares: `[run]`, and one table `[runs.NAME]` for each run beside it.

A table inherits every key that it does not give from `[run]`. If `[run]` has no name and there are tables, `[run]`
only has the keys that the tables share, and the first table is the first run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from proxy.contract.configuration import ENVIRONMENT_PREFIX, environment_values, merge
from proxy.settings.section import ConfigurationError

SHARED = "run"
TABLES = "runs"
_ALL_TABLES = f"{ENVIRONMENT_PREFIX}{TABLES}".upper()


def with_environment(tables: Any, environment: Mapping[str, str]) -> Any:
    """Return the tables of the file with those of the environment laid over.

    `BASE_RL_RUNS` is a JSON object of tables by name, for names that a variable's name cannot hold;
    `BASE_RL_RUNS__NAME__KEY` sets one key. Raise ConfigurationError if `BASE_RL_RUNS` is anything else.
    """
    if not isinstance(tables, Mapping):
        return tables  # wrong in the file: the validation says so
    if (text := environment.get(_ALL_TABLES)) is not None:
        tables = merge(tables, _tables_in(text))
    # Variables are read in lower case, but names of runs may have capitals: `BASE_RL_RUNS__SHOP__MODEL` means the
    # table [runs.Shop] if there is one.
    names = {name.lower(): name for name in tables}
    single = environment_values(environment, TABLES)
    return merge(tables, {names.get(name, name): table for name, table in single.items()})


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections with every table of `runs` complete, and the first run in `run`.

    Raise ConfigurationError if a table names another run than its own.
    """
    shared, tables = values.get(SHARED, {}), values.get(TABLES, {})
    if not tables or not isinstance(shared, Mapping) or not isinstance(tables, Mapping):
        return dict(values)
    common = {key: value for key, value in shared.items() if key != "name"}
    complete = {name: _complete(name, own, common) for name, own in tables.items()}
    first = complete.get(shared.get("name", next(iter(complete))), shared)
    return {**values, SHARED: first if isinstance(first, Mapping) else shared, TABLES: complete}


def is_inherited(values: Mapping[str, Any], location: tuple[int | str, ...]) -> bool:
    """Return whether the value at `location` of the resolved sections was given elsewhere, where it is reported too.

    `values` are the sections as they were given.
    """
    shared, tables = values.get(SHARED, {}), values.get(TABLES, {})
    if not tables or not isinstance(shared, Mapping) or not isinstance(tables, Mapping):
        return False
    match location:
        case ("runs", str(name), str(key), *_):
            return key in shared and key not in tables[name] and key != "name"
        case ("run", str(key), *_):
            first = tables.get(shared.get("name", next(iter(tables))))
            return key not in shared or (isinstance(first, Mapping) and key in first)
    return False


def _complete(name: str, own: Any, common: Mapping[str, Any]) -> Any:
    if not isinstance(own, Mapping):
        return own
    if own.get("name", name) != name:
        raise ConfigurationError(f"{TABLES}.{name}.name: a run is named by its table; rename the table instead")
    return _without_itself({**merge(common, own), "name": name}, own)


def _without_itself(table: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table without inherited judges that ask this very run: it judges the others."""
    judges, given = table.get("judges"), own.get("judges", {})
    if not isinstance(judges, Mapping) or not isinstance(given, Mapping):
        return table
    left = {key: judge for key, judge in judges.items() if key in given or not _asks(judge, table["name"])}
    return {**table, "judges": left}


def _asks(judge: Any, run: str) -> bool:
    return isinstance(judge, Mapping) and str(judge.get("model", "")).partition("@")[0] == f"run:{run}"


def _tables_in(text: str) -> Mapping[str, Any]:
    try:
        tables = json.loads(text)
    except json.JSONDecodeError:
        tables = None
    if not isinstance(tables, Mapping):
        raise ConfigurationError(
            f'{_ALL_TABLES}: write a JSON object of tables by the names of runs, such as {{"shop": {{"model": "…"}}}}'
        )
    return tables
