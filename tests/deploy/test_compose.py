"""Compare docker-compose.yml and the Dockerfile with the code: commands, settings, ports, files, secrets, rights."""

from __future__ import annotations

import importlib
import json
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from jsonschema import Draft7Validator

from proxy.settings import Settings, load_settings
from tests.deploy.composition import (
    COMPOSE,
    DOCKERFILE,
    EXAMPLE,
    OURS,
    SECRETS_IN_CONTAINERS,
    SERVICES,
    TEXT,
    VARIABLE,
    command,
    filled,
    image_environment,
    service_environment,
    settings_environment,
)
from tests.docs.markdown import ROOT, code, rows
from tests.docs.test_commands import check
from tests.docs.test_reference import labels, section
from trainer.config.loading import load_settings as load_trainer_settings

ONCE = "volumes"
"""The service that prepares the volumes and ends."""
PERMANENT = [name for name in SERVICES if name != ONCE]


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    subprocess.run([ROOT / "deploy" / "make-secrets.sh", folder], check=True, capture_output=True)
    return folder


def parsed(name: str) -> Any:
    """Return a YAML file of `deploy`."""
    return importlib.import_module("yaml").safe_load((ROOT / "deploy" / name).read_text())


def settings_of(name: str, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for key, value in settings_environment(name, secrets).items():
        monkeypatch.setenv(key, value)
    return load_settings(None)


def test_the_file_is_valid_by_the_compose_specification() -> None:
    # schema/compose-spec.json of github.com/compose-spec/compose-spec (Apache-2.0) on 23 June 2026, without spaces.
    schema = json.loads((ROOT / "tests" / "deploy" / "compose-spec.json").read_text())
    assert [error.message for error in Draft7Validator(schema).iter_errors(COMPOSE)] == []


@pytest.mark.parametrize("name", [name for name in SERVICES if "command" in SERVICES[name]])
def test_every_command_exists_with_its_options(name: str) -> None:
    if "sglang.launch_server" not in command(name):
        check(command(name), f"docker-compose.yml: {name}")


@pytest.mark.parametrize("name", OURS)
def test_every_image_is_a_target_of_the_dockerfile(name: str) -> None:
    build = SERVICES[name]["build"]
    assert f" AS {build['target']}\n" in DOCKERFILE
    assert set(build.get("args", {})) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    same = [other for other in OURS if SERVICES[other]["image"] == SERVICES[name]["image"]]
    assert all(SERVICES[other]["build"] == build for other in same)


def test_the_proxys_settings_fit_the_other_services(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("proxy", secrets, monkeypatch)
    assert settings.server.host == "0.0.0.0"
    assert SERVICES["proxy"]["ports"] == [f"127.0.0.1:{settings.server.port}:{settings.server.port}"]
    assert f"EXPOSE {settings.server.port}\n" in DOCKERFILE
    for engine in ("engine", "engine-gpu"):
        words = command(engine)
        assert settings.engine.url == f"http://engine:{words[words.index('--port') + 1]}"
        assert SERVICES[engine]["networks"] == {"calls": {"aliases": ["engine"]}}
        assert settings.run.model in words
    postgres = service_environment("postgres")
    password = (secrets / "postgres_password").read_text()
    store = f"{postgres['POSTGRES_USER']}:{password}@postgres:5432/{postgres['POSTGRES_DB']}"
    assert settings.database_url == f"postgresql+psycopg://{store}"
    assert settings.jobs.full_broker == f"redis://:{(secrets / 'redis_password').read_text()}@redis:6379/0"
    keys = [settings.bootstrap.admin_key, settings.bootstrap.run_key, settings.bootstrap.trainer_key]
    assert len({key.get_secret_value() for key in keys if key is not None}) == 3


def test_a_worker_has_the_proxys_database_and_broker(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = settings_of("worker", secrets, monkeypatch)
    proxy = settings_of("proxy", secrets, monkeypatch)
    assert (worker.database, worker.jobs) == (proxy.database, proxy.jobs)
    assert worker.server.data_dir == proxy.server.data_dir


@pytest.mark.parametrize("name", ["trainer", "trainer-gpu"])
def test_a_trainers_settings_fit_the_proxys(name: str, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of("proxy", secrets, monkeypatch)
    for key, value in settings_environment(name, secrets).items():
        monkeypatch.setenv(key, value)
    trainer = load_trainer_settings(None)
    assert trainer.proxy_url == f"http://proxy:{settings.server.port}"
    assert trainer.api_key == settings.bootstrap.trainer_key
    assert trainer.run == settings.run.name
    assert trainer.weights.directory == settings.server.data_dir / "weights"


def test_every_health_check_asks_for_the_endpoint_of_its_service() -> None:
    address = re.compile(r"http://127\.0\.0\.1:(\d+)([\w/-]+)")
    asked = {name: address.findall(str(service.get("healthcheck"))) for name, service in SERVICES.items()}
    assert {name: found for name, found in asked.items() if found} == {
        "proxy": [("8080", "/readyz")],
        "worker": [("9101", "/metrics")],
        "engine": [("30000", "/health")],
        "engine-gpu": [("30000", "/health")],
        "prometheus": [("9090", "/-/healthy")],
        "grafana": [("3000", "/api/health")],
    }
    # A trainer answers nothing: one that dies is restarted, and one that hangs loses its lease.
    assert {name for name in PERMANENT if "healthcheck" not in SERVICES[name]} == {"trainer", "trainer-gpu"}


def test_services_wait_for_what_they_need_to_start() -> None:
    awaited = {
        (other, how["condition"]) for each in SERVICES.values() for other, how in each.get("depends_on", {}).items()
    }
    healthy = {other for other, condition in awaited if condition == "service_healthy"}
    assert awaited - {(other, "service_healthy") for other in healthy} == {(ONCE, "service_completed_successfully")}
    assert healthy == {"postgres", "redis", "proxy", "prometheus"}
    assert all("healthcheck" in SERVICES[other] for other in healthy)
    for name, service in SERVICES.items():
        for other in service.get("depends_on", {}):
            assert SERVICES[other].get("profiles", service.get("profiles")) == service.get("profiles"), name


def test_every_profile_has_an_engine_and_a_trainer() -> None:
    profiles = {name: tuple(service["profiles"]) for name, service in SERVICES.items() if "profiles" in service}
    observing = {"prometheus": ("observe",), "grafana": ("observe",)}
    engines = {"engine": ("cpu",), "trainer": ("cpu",), "engine-gpu": ("gpu",), "trainer-gpu": ("gpu",)}
    assert profiles == engines | observing
    assert (EXAMPLE["COMPOSE_PROFILES"],) in profiles.values()


def test_alerts_and_dashboard_ask_for_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "base-rl.json").read_text())
    asked = [rule["expr"] for group in parsed("alerts.yml")["groups"] for rule in group["rules"]]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    # test_reference.py compares the table with the code.
    known = {code(cells[0])[0]: set(labels(cells[2])) for cells in rows(section("Metrics"))}
    for expression in asked:
        for name, given in re.findall(r"\b(base_rl_\w+?)(?:_bucket)?\b(?:\{([^}]*)\})?", expression):
            assert name in known, f"{expression}: there is no metric {name}"
            assert set(re.findall(r"(\w+)=~?", given)) <= known[name], expression
    assert len(asked) > 20


def test_prometheus_asks_services_at_their_ports() -> None:
    jobs = {job["job_name"]: job for job in parsed("prometheus.yml")["scrape_configs"]}
    assert jobs["proxy"]["static_configs"] == [{"targets": ["proxy:8080"]}]
    (workers,) = jobs["worker"]["dns_sd_configs"]
    assert (workers["names"], str(workers["port"])) == (["worker"], command("worker")[-1])
    source = parsed("grafana/datasource.yml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.parametrize("name", PERMANENT)
def test_services_have_few_rights_and_bounded_logs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    others = {"postgres": "999:999", "redis": "999:999", "prometheus": "65534:65534", "grafana": "472:0"}
    assert service["user"] == others.get(name, "1000:1000")
    assert service["restart"] == "unless-stopped"
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}
    assert service["pids_limit"] > 0
    assert not {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode"} & set(service)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_only_the_owner_of_the_volumes_is_root_and_has_one_capability() -> None:
    service = SERVICES[ONCE]
    assert (service["user"], service["cap_drop"], service["cap_add"]) == ("0:0", ["ALL"], ["CHOWN"])
    assert (service["read_only"], service["network_mode"]) == (True, "none")
    program, owner, *folders = command(ONCE)
    assert (program, owner) == ("chown", "1000:1000")
    assert folders == [each.split(":")[1] for each in service["volumes"]]
    assert "restart" not in service


def test_secrets_are_files_that_the_script_makes_once(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    script = [ROOT / "deploy" / "make-secrets.sh", folder]
    subprocess.run(script, check=True, capture_output=True)
    made = {file.name: file.read_text() for file in folder.iterdir()}
    assert set(made) == set(COMPOSE["secrets"])
    assert all(re.fullmatch(r"[0-9a-f]{48}", value) for value in made.values())
    assert len(set(made.values())) == len(made)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    # Users of containers read them through the mount.
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o444}
    (folder / "run_key").unlink()
    subprocess.run(script, check=True, capture_output=True)
    again = {file.name: file.read_text() for file in folder.iterdir()}
    assert {name for name in made if made[name] != again[name]} == {"run_key"}


def test_no_secret_is_in_the_file_or_in_an_environment() -> None:
    named = set(COMPOSE["secrets"])
    assert {each for service in SERVICES.values() for each in service.get("secrets", [])} == named
    for name, secret in COMPOSE["secrets"].items():
        assert filled(secret["file"]) == f"{EXAMPLE['SECRETS']}/{name}"
    for name, service in SERVICES.items():
        for key, value in service_environment(name).items():
            if value.startswith(SECRETS_IN_CONTAINERS):
                assert value.removeprefix(SECRETS_IN_CONTAINERS) in service["secrets"]
                assert key.endswith("_FILE")
            else:
                assert not re.search(r"KEY|PASSWORD|SECRET|TOKEN", key), f"{name}: {key}"
    assert not re.search(r"KEY|PASSWORD|TOKEN", " ".join(EXAMPLE))
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_example_of_the_environment_has_every_variable_with_its_default() -> None:
    used = VARIABLE.findall(TEXT)
    assert {*EXAMPLE} == {"COMPOSE_PROFILES", *(name for name, _, _ in used)}
    # Without .env there would be no profile, so neither engine nor trainer: that start is refused.
    assert {name for name, mark, _ in used if mark == "?"} == {"RUN"}
    defaults = {name: default for name, mark, default in used if mark == "-"}
    assert defaults == {name: value for name, value in EXAMPLE.items() if name not in ("COMPOSE_PROFILES", "RUN")}


def test_everything_that_is_written_is_in_a_volume_or_in_memory() -> None:
    assert "mkdir /data /models && \\\n    chown base-rl:base-rl /data /models\n" in DOCKERFILE
    for name, service in SERVICES.items():
        mounts = dict(each.split(":")[:2] for each in service["volumes"])
        assert {source for source in mounts if not source.startswith("./")} <= set(COMPOSE["volumes"])
        assert all((ROOT / source).is_file() for source in mounts if source.startswith("./"))
        if name in OURS or name == "engine-gpu":
            assert mounts == {"data": "/data", "models": "/models"}
        if name in PERMANENT:
            assert all("size=" in each for each in service["tmpfs"]), "a tmpfs without a bound takes half the memory"
    image = image_environment()
    assert (image["BASE_RL_SERVER__DATA_DIR"], image["HF_HOME"], image["HOME"]) == ("/data", "/models", "/tmp")


def test_every_network_is_declared_and_the_store_has_no_way_out() -> None:
    used = {name: set(service.get("networks", [])) for name, service in SERVICES.items()}
    assert set().union(*used.values()) == set(COMPOSE["networks"])
    assert COMPOSE["networks"]["store"] == {"internal": True}
    assert {name for name in used if "store" in used[name]} == {"postgres", "redis", "proxy", "worker"}
    assert used["postgres"] == used["redis"] == {"store"}


def test_every_copied_file_exists_and_is_part_of_the_build() -> None:
    ignored, *included = (ROOT / ".dockerignore").read_text().split()
    assert ignored == "*"
    allowed = [PurePosixPath(each.removeprefix("!")) for each in included if each.startswith("!")]
    assert all((ROOT / each).exists() for each in allowed)
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {PurePosixPath(each) for line in lines for each in line.split() if each != "."}
    assert PurePosixPath("deploy/requirements.py") in copied
    assert all((ROOT / each).exists() and any(each.is_relative_to(top) for top in allowed) for each in copied)


def test_the_images_install_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"requirements\.py pyproject\.toml ([\w ]+) >", DOCKERFILE)
    assert named == ["celery", "embedded train"]
    script = [sys.executable, str(ROOT / "deploy" / "requirements.py"), str(ROOT / "pyproject.toml")]
    for extras in named:
        printed = subprocess.run([*script, *extras.split()], check=True, capture_output=True, text=True).stdout
        expected = [*project["dependencies"]]
        for extra in extras.split():
            expected += project["optional-dependencies"][extra]
        assert printed.splitlines() == expected
