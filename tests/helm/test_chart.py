"""The Helm chart: what it renders is valid for Kubernetes, and base-rl reads the settings that the pods get."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Settings, load_settings
from tests.helm.conftest import CHART, ROOT, Refused, Render, yaml
from trainer.config.loading import load_settings as load_trainer_settings

pytestmark = [pytest.mark.helm, pytest.mark.xdist_group("helm")]

VERSIONS = ("1.25.0", "1.37.0")
"""Versions of Kubernetes: the oldest that Chart.yaml names, and the newest whose schemas the library has."""
LEAST: dict[str, Any] = {
    "images": {"proxy": "registry/base-rl:proxy", "engine": "registry/sglang:1", "trainer": "registry/base-rl:cuda"},
    "secret": "base-rl",
    "run": {"name": "support", "model": "Qwen/Qwen3-0.6B"},
    "publicUrl": "https://rl.example.org",
    "database": "postgresql://base_rl@postgres:5432/base_rl",
}
MOST: dict[str, Any] = {
    **LEAST,
    "broker": "redis://redis:6379/0",
    "config": '[providers.local]\nbase_url = "http://models:8000/v1"\n',
    "ingress": {"enabled": True, "host": "rl.example.org", "tlsSecret": "certificate", "className": "nginx"},
    "engine": {"replicas": 3, "gpus": 4, "args": ["--mem-fraction-static", "0.8"]},
    "trainer": {"gpus": 8, "env": {"BASE_RL_TRAINER__OPTIMIZER__LEARNING_RATE": "1e-6"}},
    "volumes": {"data": {"storageClass": "shared"}, "models": {"existingClaim": "models"}},
}
ON_CPUS: dict[str, Any] = {
    **LEAST,
    "engine": {"kind": "embedded", "gpus": 0},
    "trainer": {"gpus": 0},
    "proxy": {"replicas": 1},
    "networkPolicy": False,
}
OTHER_VALUES = {
    "run.name": "sales",
    "run.model": "Qwen/Qwen3-4B",
    "publicUrl": "http://other",
    "database": "postgresql://other/db",
    "broker": "rediss://other:6379/1",
    "engine.kind": "embedded",
    "trainer.replicas": 0,
    "service.type": "NodePort",
    "images.pullPolicy": "Always",
    "images.pullSecrets": ["other"],
    "config": "[judging]\nbusy_share = 0.5\n",
}
"""A value for each that has a form of its own. Others are a longer text, the next number, or a different size."""


OTHER_OF_A_NAME = {
    "accessMode": "ReadWriteOnce",
    "size": "3Gi",
    "sharedMemory": "3Gi",
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "args": ["--other"],
    "resources": {"limits": {"memory": "3Gi"}},
}


def documents(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(text) if each]


def named(text: str, kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in documents(text) if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def container(document: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = document["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(document: Mapping[str, Any], secrets: Path) -> dict[str, str]:
    """Return the container's variables, with the secrets in the folder `secrets`."""
    variables = {each["name"]: each["value"] for each in container(document)["env"]}
    return {key: value.replace("/run/secrets", str(secrets)) for key, value in variables.items()}


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    subprocess.run([ROOT / "deploy" / "make-secrets.sh", folder], check=True, capture_output=True)
    return folder


def example() -> dict[str, Any]:
    """Return the values that docs/scale.md shows."""
    page = (ROOT / "docs" / "scale.md").read_text()
    (text,) = re.findall(r"^cat > my-values\.yaml <<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)
    return dict(yaml.safe_load(text))


@pytest.mark.parametrize("values", [LEAST, MOST, ON_CPUS, example()], ids=["least", "most", "on CPUs", "the page's"])
def test_what_is_rendered_is_valid(values: Mapping[str, Any], render: Render, programs: Path, tmp_path: Path) -> None:
    text = render(values)
    for number, document in enumerate(documents(text)):
        (tmp_path / f"{number}.yaml").write_text(yaml.safe_dump(document))
    files = sorted(tmp_path.glob("[0-9]*.yaml"))
    assert len(files) >= 8
    for version in VERSIONS:
        command = [str(programs / "kubernetes-validate"), "--strict", "-k", version, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def test_helm_finds_nothing_to_complain_about(programs: Path, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(MOST))
    command = [str(programs / "helm"), "lint", "--strict", str(CHART), "--values", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_proxies_read_their_settings(
    render: Render, secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = render(MOST)
    settings = _settings(text, "rl-proxy", secrets, tmp_path, monkeypatch)
    assert settings.run.name == "support"
    assert settings.run.model == "Qwen/Qwen3-0.6B"
    assert settings.server.public_url == "https://rl.example.org"
    assert settings.bootstrap.admin_key is not None
    assert settings.jobs.broker is not None
    assert settings.providers["local"].base_url == "http://models:8000/v1"
    # Each engine has the name that its pod gets from the headless service.
    engine = named(text, "StatefulSet", "rl-engine")
    service = named(text, "Service", engine["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    port = service["spec"]["ports"][0]["port"]
    assert {name: each.url for name, each in settings.engines.items()} == {
        f"rl-engine-{number}": f"http://rl-engine-{number}.{service['metadata']['name']}.learning.svc:{port}"
        for number in range(engine["spec"]["replicas"])
    }
    words = container(engine)["command"]
    assert words[words.index("--port") + 1] == str(port)
    grace = named(text, "Deployment", "rl-proxy")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.server.stop_grace_seconds


def test_workers_read_their_settings(
    render: Render, secrets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = render(MOST)
    settings = _settings(text, "rl-worker", secrets, tmp_path, monkeypatch)
    assert settings.jobs.broker is not None
    assert settings.database.url is not None
    assert "rl-worker" not in render(LEAST)


def test_the_trainer_reads_its_settings(render: Render, secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = render(MOST)
    deployment = named(text, "Deployment", "rl-trainer")
    for key, value in environment(deployment, secrets).items():
        monkeypatch.setenv(key, value)
    settings = load_trainer_settings(None)
    assert settings.proxy_url == "http://rl-proxy:8080"
    assert settings.run == "support"
    assert settings.device == "cuda"
    assert settings.optimizer.learning_rate == 1e-6
    assert named(text, "Service", "rl-proxy")["spec"]["ports"][0]["port"] == 8080
    words = container(deployment)["command"]
    assert words == ["base-rl", "train", "--proxy", "http://rl-proxy:8080", "--nproc", "8"]
    assert container(deployment)["resources"]["limits"]["nvidia.com/gpu"] == 8
    # One process needs no command that starts others.
    alone = named(render(LEAST), "Deployment", "rl-trainer")
    assert container(alone)["command"] == ["python", "-m", "trainer"]


def test_every_pod_is_without_rights(render: Render) -> None:
    for document in documents(render(MOST)):
        if document["kind"] in {"Deployment", "StatefulSet"}:
            pod = document["spec"]["template"]["spec"]
            assert pod["securityContext"]["runAsNonRoot"]
            assert not pod["automountServiceAccountToken"]
            rights = container(document)["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            # All that is written goes to a volume.
            mounts = {each["mountPath"] for each in container(document)["volumeMounts"]}
            assert {"/data", "/models", "/tmp"} <= mounts


def test_the_secret_has_the_keys_that_the_script_makes(render: Render, secrets: Path) -> None:
    used = set(re.findall(r"/run/secrets/(\w+)", render(MOST)))
    made = {file.name for file in secrets.iterdir()}
    assert made - used == {"grafana_password"}
    assert used <= made


def test_every_value_changes_what_is_rendered(render: Render) -> None:
    """No value is accepted and ignored."""
    base = _merged(yaml.safe_load((CHART / "values.yaml").read_text()), MOST)
    before = render(base)
    ignored = []
    for path, value in _leaves(base):
        changed = copy.deepcopy(base)
        _set(changed, path, _other(path, value))
        if path == ("engine", "kind"):
            _set(changed, ("engine", "gpus"), 1)
        if path == ("volumes", "models", "existingClaim"):
            continue
        if path[:2] == ("volumes", "models"):
            _set(changed, ("volumes", "models", "existingClaim"), "")
        if render(changed) == before:
            ignored.append(".".join(path))
    assert ignored == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"secret": ""}, "secret"),
        ({"engine": {"replicsa": 2}}, "replicsa"),
        ({"engine": {"gpus": 0}}, "engine.gpus"),
        ({"engine": {"kind": "embedded", "gpus": 2}}, "engine.gpus"),
        ({"trainer": {"replicas": 2}}, "trainer.replicas"),
        ({"database": "sqlite:///data/rl.db"}, "database"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"images": {"proxy": ""}}, "images.proxy"),
    ],
)
def test_wrong_values_are_refused_by_name(change: Mapping[str, Any], message: str, render: Render) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        render(_merged(LEAST, change))


def test_without_values_helm_names_all_that_are_needed(render: Render) -> None:
    with pytest.raises(Refused) as refused:
        render({})
    for name in ("images.proxy", "images.engine", "images.trainer", "secret", "run.model", "publicUrl", "database"):
        assert name in str(refused.value)


def test_the_schema_has_exactly_the_values() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def names(described: Mapping[str, Any]) -> Any:
        properties = described.get("properties")
        return None if properties is None else {key: names(each) for key, each in properties.items()}

    def keys(value: Any, described: Any) -> Any:
        return None if described is None else {key: keys(value[key], described.get(key)) for key in value}

    described = names(schema)
    described.pop("global")  # Helm adds it to the values of every chart
    assert described == keys(values, described)


def _settings(text: str, name: str, secrets: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for key, value in environment(named(text, "Deployment", name), secrets).items():
        monkeypatch.setenv(key, value)
    content = named(text, "ConfigMap", "rl-config")["data"]["base-rl.toml"]
    assert tomllib.loads(content)
    file = folder / "base-rl.toml"
    file.write_text(content)
    return load_settings(file)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if both else value
    return found


def _leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value and key not in {"env", "resources", "annotations"}:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _set(values: Any, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        values = values[key]
    values[path[-1]] = value


def _other(path: tuple[str, ...], value: Any) -> Any:
    """Return a different value that the schema accepts."""
    name = ".".join(path)
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if path[-1] in OTHER_OF_A_NAME:
        return OTHER_OF_A_NAME[path[-1]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return {"OTHER": "1"} if isinstance(value, Mapping) else f"{value}-other"
