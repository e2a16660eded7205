"""The wiring provides every service that an endpoint takes."""

from __future__ import annotations

import ast
import importlib
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from proxy.services import Services

ROOT = Path(__file__).parents[2]


def taken_from_requests() -> list[tuple[str, type]]:
    """Return every `service(…, Type)` in the proxy: the module, and the type."""
    found: list[tuple[str, type]] = []
    for path in sorted((ROOT / "proxy").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name(id="service"), args=[_, ast.Name(id=kind)]):
                    found.append((name, getattr(importlib.import_module(name), kind)))
    return found


TAKEN = taken_from_requests()


@pytest.mark.parametrize(("module", "kind"), TAKEN, ids=[f"{module}-{kind.__name__}" for module, kind in TAKEN])
def test_every_service_that_an_endpoint_takes_is_wired(module: str, kind: type) -> None:
    assert kind in {Services, *get_type_hints(Services).values()}, f"{module} takes a service that nobody builds"


def test_types_tell_services_apart() -> None:
    hints = get_type_hints(Services)
    assert len({hints[field.name] for field in fields(Services)}) == len(fields(Services))
    assert len(TAKEN) > 20
