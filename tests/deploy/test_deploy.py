"""What is in deploy/: it parses, it uses settings, flags and routes that exist, and validators that
are installed have nothing to say. Nothing here starts a container."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from kdn.cli.main import app
from kdn.config import NodeSettings, load_config
from kdn.engines.vllm.settings import Settings
from kdn.node.app import ROUTES

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("docker/*.Dockerfile"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
UNIT = DEPLOY / "systemd" / "kdn-node.service"
PATHS = {path for method, path, _, _ in ROUTES if method == "GET"}
FLAGS = {
    flag
    for parameter in typer.main.get_command(app).commands["node"].params  # type: ignore[attr-defined]
    for flag in parameter.opts
}


def tool(name: str) -> str:
    """A validator on the path, or beside this Python."""
    beside = os.pathsep.join([os.environ.get("PATH", ""), str(Path(sys.executable).parent)])
    found = shutil.which(name, path=beside)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def check(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def documents(path: Path) -> list[Any]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def manifest(kind: str) -> Any:
    [found] = [one for path in MANIFESTS for one in documents(path) if one["kind"] == kind]
    return found


def flags_of(command: list[str]) -> set[str]:
    return {word.split("=")[0] for word in command if word.startswith("--")}


# configuration files


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("kdn.toml")), ids=lambda p: p.parent.name)
def test_configurations_are_valid(path: Path) -> None:
    config = load_config(path, environ={})
    assert config.node.shutdown_timeout_s < 45  # what all managers wait


def test_every_way_to_deploy_has_a_configuration() -> None:
    assert {path.parent.name for path in DEPLOY.rglob("kdn.toml")} == {
        "compose", "kubernetes", "systemd",
    }  # fmt: skip


# images


def test_images_copy_what_exists_and_run_flags_that_exist() -> None:
    assert len(DOCKERFILES) == 2
    for path in DOCKERFILES:
        text = path.read_text().replace("\\\n", " ")
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            assert [one for one in sources.split() if not (ROOT / one).exists()] == []
        ignored = path.with_name(f"{path.name}.dockerignore").read_text()
        assert ignored.startswith("*\n")  # nothing comes along by accident
        assert re.search(r"^USER 10001", text, re.MULTILINE)
    node = (DEPLOY / "docker" / "node.Dockerfile").read_text()
    entry = json.loads(re.findall(r"^ENTRYPOINT (.+)$", node, re.MULTILINE)[0])
    assert entry[:2] == ["kdn", "node"]
    assert flags_of(entry) <= FLAGS
    assert re.findall(r"127\.0\.0\.1:8470(/\w+)'", node) == ["/healthz"]
    for name in re.findall(r"KDN_NODE_([A-Z_]+)=", node):
        assert hasattr(NodeSettings(), name.lower())


def test_a_node_needs_no_more_than_its_image_has() -> None:
    told = (DEPLOY / "docker" / "node-requirements.txt").read_text().splitlines()
    named = {line for line in told if line and not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *extras["redis"], *extras["s3"]]
    assert named <= {re.split(r"[>=]", one)[0] for one in every}
    absent = sorted({re.split(r"[>=]", one)[0] for one in every} - named)
    code = (
        "import sys, asyncio, tempfile; from pathlib import Path\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from kdn.cli import main; from kdn.config import load_config\n"
        "from kdn.node.server import listen, open_node\n"
        "async def run(folder):\n"
        "    config = load_config(None, {'node.data': Path(folder), 'node.port': 0}, {})\n"
        "    async with open_node(config) as node, listen(config, node): pass\n"
        "with tempfile.TemporaryDirectory() as folder: asyncio.run(run(folder))\n"
    )
    assert {"torch", "numba"} <= set(absent)
    check(sys.executable, "-c", code)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    check(tool("hadolint"), str(path))


# compose


def test_the_engine_of_the_compose_file_gets_settings_that_exist(tmp_path: Path) -> None:
    told = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    services = told["services"]
    assert set(services) == {"node", "vllm", "prometheus"}
    [config] = [one for one in services["vllm"]["command"] if "kv-transfer-config" in one]
    transfer = json.loads(config.partition("=")[2])
    extra = transfer["kv_connector_extra_config"]
    assert extra["token_file"] == "/run/secrets/engines_token"
    assert "engines_token" in services["vllm"]["secrets"]
    token = tmp_path / "token"
    token.write_text("abc")
    token.chmod(0o600)
    Settings.parse(extra | {"token_file": str(token)})
    assert services["node"]["read_only"] is True
    for service in services.values():
        if "build" in service:
            context = DEPLOY / "compose" / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:")  # nothing is open to others unasked
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    targets = [job["static_configs"][0]["targets"] for job in scraped["scrape_configs"]]
    assert targets == [["node:8470"], ["vllm:8000"]]


# Kubernetes


def test_the_pod_is_bounded_and_its_probes_ask_routes_that_exist() -> None:
    spec = manifest("StatefulSet")["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["path"] in PATHS
        assert asked["port"] in [port["name"] for port in container["ports"]]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert set(container["resources"]) == {"requests", "limits"}
    config = load_config(DEPLOY / "kubernetes" / "kdn.toml", environ={})
    assert pod["terminationGracePeriodSeconds"] > config.node.shutdown_timeout_s
    [claim] = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "200Gi"
    assert config.node.disk_bytes < 200 << 30
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    image = (DEPLOY / "docker" / "node.Dockerfile").read_text()
    assert f"KDN_NODE_DATA={mounts['data']}/" in image
    assert f'"{mounts["config"]}/kdn.toml"' in image


def test_services_monitors_and_policies_mean_the_same_pods() -> None:
    labels = manifest("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    service, monitor = manifest("Service"), manifest("ServiceMonitor")
    assert service["spec"]["selector"] == labels
    assert monitor["spec"]["selector"]["matchLabels"] == service["metadata"]["labels"]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["path"] in PATHS
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    policy = manifest("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    [rule] = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [service["spec"]["ports"][0]["port"]]
    told = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    others = {path.name for path in MANIFESTS} - {"kustomization.yaml"}
    assert set(told["resources"]) == others


def test_kubernetes_schemas_are_kept() -> None:
    validator = tool("kubernetes-validate")
    for path in MANIFESTS:  # the others are of extensions, whose schemas it has not
        if path.name in ("node.yaml", "network-policy.yaml"):
            check(validator, "--strict", str(path))


# systemd


def test_the_unit_runs_flags_that_exist() -> None:
    [command] = re.findall(r"^ExecStart=(.+)$", UNIT.read_text(), re.MULTILINE)
    words = shlex.split(command)
    assert words[1] == "node"
    assert flags_of(words) <= FLAGS


def test_systemd_takes_the_unit_and_finds_it_safe(tmp_path: Path) -> None:
    systemd, unit = tool("systemd-analyze"), tmp_path / UNIT.name
    program = shutil.which("true")
    assert program is not None
    unit.write_text(UNIT.read_text().replace("/opt/kdn/bin/kdn", program))
    check(systemd, "verify", "--man=no", str(unit))
    check(systemd, "security", "--offline=true", "--threshold=20", "--no-pager", str(unit))


def test_the_readme_names_every_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    own = [path for path in DEPLOY.rglob("*") if path.is_file()]
    own = [
        path for path in own if path.parent.name in ("docker", "compose", "kubernetes", "systemd")
    ]
    assert [path.name for path in own if path.name.removesuffix(".dockerignore") not in text] == []
