"""docker-compose.yml as the tests read it: services with their variables filled in, and secrets in a folder."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

from tests.docs.markdown import ROOT

SECRETS_IN_CONTAINERS = "/run/secrets/"
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: Any = importlib.import_module("yaml").safe_load(TEXT)
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def filled(text: str) -> str:
    """Return the text with variables replaced as compose does it with `.env.example` as `.env`."""
    return VARIABLE.sub(lambda found: EXAMPLE[found[1]], text).replace("$$", "$")


def command(name: str) -> list[str]:
    return [filled(word) for word in SERVICES[name]["command"]]


def image_environment() -> dict[str, str]:
    """Return the variables that the Dockerfile sets."""
    (image,) = re.findall(r"^ENV (.*?[^\\])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return dict(each.split("=", 1) for each in shlex.split(image.replace("\\\n", " ")))


def service_environment(name: str) -> dict[str, str]:
    """Return the variables that the service adds to those of its image."""
    return {key: filled(str(value)) for key, value in SERVICES[name].get("environment", {}).items()}


def settings_environment(name: str, secrets: Path) -> dict[str, str]:
    """Return the variables of a service that are settings, with its secrets in the folder `secrets`."""
    variables = {**image_environment(), **service_environment(name)}
    mounted = {f"{SECRETS_IN_CONTAINERS}{each}": str(secrets / each) for each in SERVICES[name]["secrets"]}
    return {key: mounted.get(value, value) for key, value in variables.items() if key.startswith("BASE_RL_")}
