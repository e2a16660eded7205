"""Rules that find the parts of a text that must not be stored: built-in ones, configured patterns and analyzers."""

from __future__ import annotations

import importlib
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import regex

from proxy.settings import ConfigurationError, RedactionSettings

# Time-out for one pattern and one text. A pattern that needs longer backtracks exponentially.
_MATCH_SECONDS = 0.2


class Found(NamedTuple):
    """A range [start, end) of characters, and the name of the rule that found it."""

    start: int
    end: int
    rule: str


Finder = Callable[[str], Iterable[tuple[int, int]]]


class Rule(NamedTuple):
    """A named function `find` that returns [start, end) pairs. If it raises, the whole text counts as found."""

    name: str
    find: Finder


class TooSlow(Exception):
    """A pattern exceeded its time-out."""


def load_rules(settings: RedactionSettings) -> tuple[Rule, ...]:
    """Load the configured rules. Raise ConfigurationError for a pattern or an analyzer that cannot be used."""
    return (
        *(Rule(name, _BUILT_IN[name]) for name in settings.rules),
        *(Rule(name, _pattern(f"run.redaction.patterns.{name}", text)) for name, text in settings.patterns.items()),
        *(Rule(path.rpartition(":")[2], _analyzer(path)) for path in settings.analyzers),
    )


def found_in(text: str, rules: Iterable[Rule]) -> list[Found]:
    """Return the ranges that any rule finds, in order. Overlapping ranges are joined under the name of the first."""
    found: list[Found] = []
    for rule in rules:
        found += [Found(max(start, 0), min(end, len(text)), rule.name) for start, end in _spans(rule, text)]
    joined: list[Found] = []
    for one in sorted(one for one in found if one.start < one.end):
        if joined and one.start < joined[-1].end:
            joined[-1] = joined[-1]._replace(end=max(joined[-1].end, one.end))
        else:
            joined.append(one)
    return joined


def _spans(rule: Rule, text: str) -> list[tuple[int, int]]:
    try:
        return list(rule.find(text))
    except Exception:  # noqa: BLE001  (a text that a rule could not search must not be stored)
        return [(0, len(text))]


def _pattern(where: str, text: str, accepts: Callable[[str], bool] | None = None) -> Finder:
    try:
        compiled = regex.compile(text)
    except regex.error as error:
        raise ConfigurationError(f"{where} is not a valid regular expression: {error}") from error
    if compiled.search(""):
        raise ConfigurationError(f"{where} matches the empty text, so it would match everywhere: make it stricter")

    def find(searched: str) -> Iterator[tuple[int, int]]:
        try:
            # `concurrent` releases the interpreter's lock while the pattern runs.
            for match in compiled.finditer(searched, timeout=_MATCH_SECONDS, concurrent=True):
                if accepts is None or accepts(match.group()):
                    yield match.span()
        except TimeoutError as error:
            raise TooSlow(where) from error

    return find


def _analyzer(path: str) -> Finder:
    """Import the function at `path`, written as `module:function`.

    It takes a text and returns (start, end, …) tuples or objects with `start` and `end`, such as Presidio's results.
    """
    where = f"run.redaction.analyzers: {path!r}"
    module, separator, name = path.partition(":")
    if not separator:
        raise ConfigurationError(f"{where} must be written as module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{where} cannot be imported: {error}") from error
    if not callable(function):
        raise ConfigurationError(f"{where} is not a function")

    def find(searched: str) -> Iterator[tuple[int, int]]:
        for one in function(searched):
            yield _span(one)

    return find


def _span(one: Any) -> tuple[int, int]:
    return (one.start, one.end) if hasattr(one, "start") else (one[0], one[1])


def _is_card(text: str) -> bool:
    """Return whether a text has the length and the check digit (Luhn's algorithm) of a card number."""
    digits = [int(character) for character in text if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0


def _is_iban(text: str) -> bool:
    """Return whether a text has the length and the check digits (ISO 7064, mod 97) of an IBAN."""
    plain = "".join(text.split()).upper()
    if not 15 <= len(plain) <= 34:
        return False
    return int("".join(str(int(character, 36)) for character in plain[4:] + plain[:4])) % 97 == 1


def _is_address(text: str) -> bool:
    if not any(character.isalnum() for character in text):
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_phone(text: str) -> bool:
    """Return whether a text has 9 to 15 digits and is grouped or has a country code, unlike dates and counts."""
    digits = sum(character.isdigit() for character in text)
    return 9 <= digits <= 15 and (text.startswith(("+", "00")) or any(mark in text for mark in " -./("))


_SECRETS = (
    r"\b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic, Stripe
    r"|\b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_[A-Za-z0-9_]{30,}|\bglpat-[A-Za-z0-9_-]{20,}"
    r"|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\bhf_[A-Za-z0-9]{30,}|\bAIza[A-Za-z0-9_-]{35}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\brl-(?:admin|run|session|trainer)-[A-Za-z0-9_-]{16,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END)[\s\S])*(?:-----END [A-Z ]*PRIVATE KEY-----)?"
    r"|(?i:\b(?:api[_-]?key|secret|password|passwd|token)\b[\"']?\s*[:=]\s*[\"']?)[^\s\"',;]{8,}"
)

_BUILT_IN: dict[str, Finder] = {
    "email": _pattern("email", r"[\w.!#$%&'*+/=?^`{|}~-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"),
    "phone": _pattern("phone", r"(?<![\w+])(?:\+|00)?\(?\d{1,4}\)?(?:[ ./-]?\(?\d{1,4}\)?){2,6}(?!\w)", _is_phone),
    "credit_card": _pattern("credit_card", r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)", _is_card),
    "iban": _pattern("iban", r"\b[A-Z]{2}\d{2}(?:[ ]?[A-Z0-9]{4}){2,7}(?:[ ]?[A-Z0-9]{1,3})?\b", _is_iban),
    "ip": _pattern(
        "ip",
        r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7})(?![\w:])",
        _is_address,
    ),
    "secret": _pattern("secret", _SECRETS),
}
