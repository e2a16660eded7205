"""The script: an ordered list of rules, which say which messages they answer and how. It is checked as a whole before
any call; an error names the file, the number of the rule, and the key.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from proxy.settings import ConfigurationError

BUILT_IN = Path(__file__).parent / "built_in.toml"
"""The default script."""
MODEL = Path(__file__).parent / "model"
"""The default tokenizer and chat template, made by `make_model.py`."""

PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*|\d+)\}")
MESSAGE = "message"
"""The placeholder that every rule may use: the text of the prompt's last message."""

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=86_400_000)]


class Match(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions on the prompt's last message; a condition that is not set always holds. `turn` is the number of the
    answer in its conversation, from 1. A raw prompt without a conversation has the role `prompt`."""

    contains: str | None = None
    regex: str | None = None
    role: Literal["user", "tool", "system", "prompt"] | None = None
    turn: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def anything(self) -> bool:
        return self == _ANYTHING


_ANYTHING = Match()


class ScriptedCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call. `arguments` is an object, with placeholders in its texts; or an object's JSON text, in which
    placeholders may stand for numbers too."""

    name: Annotated[str, msgspec.Meta(min_length=1)]
    arguments: dict[str, Any] | str = {}


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A failure of the engine with this status, after `after_tokens` tokens of the answer."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "the script says so"
    after_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule. `text`, `echo`, `json` and `raw` exclude each other; `raw` is sent as it is, without the template.
    `finish = "length"` repeats the answer until the caller's bound on tokens."""

    match: Match = _ANYTHING
    text: str | None = None
    echo: bool = False
    json: Any = msgspec.UNSET
    raw: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ScriptedCall, ...] = ()
    error: Failure | None = None
    finish: Literal["stop", "length"] = "stop"
    delay_ms: Milliseconds | None = None
    ms_per_token: Milliseconds | None = None
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None


class Pace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pace of rules that do not set one."""

    delay_ms: Milliseconds = 0
    ms_per_token: Milliseconds = 0


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole script."""

    rule: tuple[Rule, ...]
    defaults: Pace = Pace()


def read_script(path: Path) -> Script:
    """Read a TOML file, or a JSON file if its name ends in `.json`. Raises ConfigurationError with a line per
    fault."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"cannot read the script {path}: {error.strerror or error}") from error
    except ValueError as error:  # raised for TOML, for JSON, and for text that is not UTF-8
        raise ConfigurationError(f"{path}: {error}") from error
    faults, rules = [], []
    try:
        script = msgspec.convert({**values, "rule": []} if isinstance(values, dict) else values, Script)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{path}: {_words(error)}") from error
    written = values.get("rule")
    if not isinstance(written, list) or not written:
        raise ConfigurationError(f"{path}: there is no rule; write at least one, under [[rule]]")
    for number, value in enumerate(written, 1):
        try:
            rule = msgspec.convert(value, Rule)
        except msgspec.ValidationError as error:
            faults.append(f"{path}: rule {number}: {_words(error)}")
            continue
        rules.append(rule)
        faults += [f"{path}: rule {number}: {fault}" for fault in _faults(rule)]
    faults += [f"{path}: {fault}" for fault in _never_reached(rules)] if len(rules) == len(written) else []
    if faults:
        raise ConfigurationError("\n".join(faults))
    return msgspec.structs.replace(script, rule=tuple(rules))


def texts_of(rule: Rule) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for every text that may hold placeholders."""
    for key in ("text", "raw", "reasoning"):
        if (text := getattr(rule, key)) is not None:
            yield key, text
    if rule.json is not msgspec.UNSET:
        yield from (("json", text) for text in _strings(rule.json))
    for index, call in enumerate(rule.tool_calls):
        key = f"tool_calls[{index}].arguments"
        yield from ((key, text) for text in _strings(call.arguments))


def fill(text: str, values: dict[str, str]) -> str:
    """Replace placeholders by their values; braces around anything else stay."""
    return PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)


def fill_all(value: Any, values: dict[str, str]) -> Any:
    """Replace placeholders in every text of a JSON value; keys stay as they are."""
    if isinstance(value, str):
        return fill(value, values)
    if isinstance(value, list):
        return [fill_all(each, values) for each in value]
    if isinstance(value, dict):
        return {key: fill_all(each, values) for key, each in value.items()}
    return value


def _faults(rule: Rule) -> Iterator[str]:
    answers = [key for key in ("text", "raw") if getattr(rule, key) is not None]
    answers += ["json"] if rule.json is not msgspec.UNSET else []
    answers += ["echo"] if rule.echo else []
    if len(answers) > 1:
        yield f"{' and '.join(sorted(answers))}: only one of them can be the answer"
    if rule.raw is not None and (rule.reasoning is not None or rule.tool_calls):
        yield "raw: is the whole answer, so neither reasoning nor tool_calls can stand beside it"
    has_answer = bool(answers or rule.tool_calls or rule.reasoning)
    if rule.error is not None and rule.error.after_tokens > 0 and not has_answer:
        yield "error.after_tokens: there is no answer whose tokens could come before"
    if not has_answer and rule.error is None:
        yield "it has no answer: set text, echo, json, raw, tool_calls or error"
    yield from _regex_faults(rule)
    yield from _argument_faults(rule)
    try:
        json.dumps(None if rule.json is msgspec.UNSET else rule.json, allow_nan=False)
    except (TypeError, ValueError) as error:
        yield f"json: {error} (JSON has no dates, and no NaN)"


def _regex_faults(rule: Rule) -> Iterator[str]:
    if rule.match.regex is None:
        return
    try:
        pattern = re.compile(rule.match.regex)
    except re.error as error:
        yield f"match.regex: {error}"
        return
    for key, text in texts_of(rule):
        for name in PLACEHOLDER.findall(text):
            if name.isdecimal() and int(name) > pattern.groups:
                yield f"{key}: {{{name}}}, but match.regex has {pattern.groups} groups"


def _argument_faults(rule: Rule) -> Iterator[str]:
    for index, call in enumerate(rule.tool_calls):
        key = f"tool_calls[{index}].arguments"
        try:
            if not isinstance(call.arguments, str):
                json.dumps(call.arguments, allow_nan=False)
            elif not isinstance(json.loads(PLACEHOLDER.sub("0", call.arguments)), dict):
                yield f"{key}: is not a JSON object"
        except (TypeError, ValueError) as error:
            yield f"{key}: {error}"


def _never_reached(rules: list[Rule]) -> Iterator[str]:
    for number, rule in enumerate(rules, 1):
        if rule.match.anything and rule.times is None and number < len(rules):
            yield f"rule {number + 1} is never reached: rule {number} answers everything"
            return


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)


def _words(error: msgspec.ValidationError) -> str:
    """Return msgspec's message with the key in front; msgspec puts it at the end, as a path from `$`."""
    what, found, place = str(error).rpartition(" - at `$")
    if not found:
        return str(error)
    return f"{place.rstrip('`').lstrip('.')}: {what}"
