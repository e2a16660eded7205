"""Compare docker-compose.yml and the Dockerfile with the code: commands, settings, ports, files and secrets."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest

from proxy.settings import Settings, load_settings
from tests.docs.markdown import ROOT
from tests.docs.test_commands import check
from trainer.config.loading import load_settings as load_trainer_settings

COMPOSE: Any = importlib.import_module("yaml").safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def filled(text: str) -> str:
    """Return the text with variables replaced as compose does; a required variable gets its own name as value."""
    return _VARIABLE.sub(lambda found: found[3] if found[2] == "-" else found[1].lower(), text)


def environment(name: str) -> dict[str, str]:
    """Return the variables of a service, those of its image included."""
    (image,) = re.findall(r"^ENV (.*?[^\\])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    of_image = dict(each.split("=", 1) for each in shlex.split(image.replace("\\\n", " ")))
    of_service = {key: filled(str(value)) for key, value in SERVICES[name].get("environment", {}).items()}
    return {key: value for key, value in {**of_image, **of_service}.items() if key.startswith("BASE_RL_")}


@pytest.mark.parametrize("name", OURS)
def test_every_command_exists_with_its_options(name: str) -> None:
    check([filled(word) for word in SERVICES[name]["command"]], f"docker-compose.yml: {name}")


def test_the_proxys_settings_exist_and_fit_the_other_services(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolved("proxy", monkeypatch)
    assert settings.server.host == "0.0.0.0"
    assert SERVICES["proxy"]["ports"] == [f"127.0.0.1:{settings.server.port}:{settings.server.port}"]
    assert f"EXPOSE {settings.server.port}\n" in DOCKERFILE
    port = SERVICES["engine"]["command"][SERVICES["engine"]["command"].index("--port") + 1]
    assert settings.engine.url == f"http://engine:{port}"
    assert settings.run.model == filled(SERVICES["engine"]["command"][4])
    postgres = SERVICES["postgres"]["environment"]
    owner = f"{postgres['POSTGRES_USER']}:{filled(postgres['POSTGRES_PASSWORD'])}"
    assert settings.database.url == f"postgresql+psycopg://{owner}@postgres/{postgres['POSTGRES_DB']}"


def test_the_trainers_settings_exist_and_fit_the_proxys(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolved("proxy", monkeypatch)
    for key, value in environment("trainer").items():
        monkeypatch.setenv(key, value)
    trainer = load_trainer_settings(None)
    assert trainer.proxy_url == f"http://proxy:{settings.server.port}"
    assert trainer.api_key == settings.bootstrap.trainer_key
    assert trainer.run == settings.run.name
    assert trainer.weights.directory == settings.server.data_dir / "weights"


def resolved(name: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for key, value in environment(name).items():
        monkeypatch.setenv(key, value)
    return load_settings(None)


def test_every_health_check_asks_for_the_endpoint_of_its_service() -> None:
    address = re.compile(r"http://127\.0\.0\.1:(\d+)(/\w+)")
    asked = {name: address.findall(str(SERVICES[name].get("healthcheck"))) for name in OURS}
    assert asked == {"engine": [("30000", "/health")], "proxy": [("8080", "/readyz")], "trainer": []}


def test_every_awaited_service_has_a_health_check() -> None:
    awaited = {each for service in SERVICES.values() for each in service.get("depends_on", {})}
    assert awaited == {"postgres", "engine", "proxy"}
    assert all("healthcheck" in SERVICES[name] for name in awaited)


def test_every_secret_comes_from_the_environment_and_is_required() -> None:
    used = _VARIABLE.findall((ROOT / "docker-compose.yml").read_text())
    assert set(EXAMPLE) == {name for name, _, _ in used}
    required = {name for name, mark, _ in used if mark == "?"}
    assert required == {name for name, value in EXAMPLE.items() if not value}
    assert {name: default for name, mark, default in used if mark == "-"} == {
        name: value for name, value in EXAMPLE.items() if value
    }
    for service in SERVICES.values():
        for key, value in service.get("environment", {}).items():
            assert not re.search(r"KEY|PASSWORD", key) or _VARIABLE.search(value)


def test_everything_that_a_service_writes_is_in_a_volume() -> None:
    writable = {"/data", "/models"}
    assert f"mkdir {' '.join(sorted(writable))} && chown base-rl" in DOCKERFILE
    for name in OURS:
        mounts = {each.split(":")[1] for each in SERVICES[name]["volumes"]}
        assert mounts == writable
        assert {each.split(":")[0] for each in SERVICES[name]["volumes"]} <= set(COMPOSE["volumes"])


def test_every_copied_file_exists_and_is_part_of_the_build() -> None:
    ignored, *included = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "*"
    kept = [PurePosixPath(each.removeprefix("!")) for each in included if each.startswith("!")]
    assert all((ROOT / each).exists() for each in kept)
    sources = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE)
    copied = [PurePosixPath(each) for each in sources if each != "."]
    assert copied
    assert all((ROOT / each).exists() and any(each.is_relative_to(top) for top in kept) for each in copied)


def test_the_images_have_extras_that_the_project_has() -> None:
    extras = {
        extra for name in OURS for extra in SERVICES[name]["build"].get("args", {}).get("EXTRAS", "").split(",")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras - {""} == {"embedded", "train"} <= set(project["optional-dependencies"])
