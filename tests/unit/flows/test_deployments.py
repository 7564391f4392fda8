"""What `deployments/` holds, read without a server, Docker or Kubernetes."""

import json
import os
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import ConcurrencyLimitSpec, DeploymentConfig, WorkPoolConfig
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import Flow
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields
from prefect.workers.process import ProcessWorker

from flows.operation import deploy
from flows.operation.deploy import POOLS, automations, shipped
from rlcore.config import RunConfig
from rlcore.config.load import build_config

FOLDER = Path(__file__).parents[3] / "deployments"
PREFECT = yaml.safe_load((FOLDER / "prefect.yaml").read_text())
COMPOSE = yaml.safe_load((FOLDER / "docker" / "compose.yaml").read_text())
DOCUMENTS = [
    document
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
]
SECRET_WORD = re.compile(r"password|secret|token|key", re.IGNORECASE)
"""What the name of a variable holds whose value is nobody's business."""


def places(tree: Any) -> Any:
    """The file as it is with its `{{ $NAME }}` filled in."""
    text = json.dumps(tree)
    return json.loads(re.sub(r"\{\{ \$(\w+) \}\}", r"/places/\1", text))


# --- prefect.yaml ---------------------------------------------------------------------------------


def test_prefect_knows_every_key_of_the_deployments() -> None:
    """It would drop those that it does not know without a word."""
    for deployment in PREFECT["deployments"]:
        assert set(deployment) <= set(DeploymentConfig.model_fields), deployment["name"]
        assert set(deployment["work_pool"]) <= set(WorkPoolConfig.model_fields)
        limit = deployment.get("concurrency_limit", {})
        assert set(limit) <= set(ConcurrencyLimitSpec.model_fields)
        DeploymentConfig.model_validate(deployment)


def test_entrypoints_are_flows_that_take_the_parameters() -> None:
    names = {}
    for deployment in PREFECT["deployments"]:
        module, _, name = deployment["entrypoint"].rpartition(".")
        flow = getattr(import_module(module), name)
        assert isinstance(flow, Flow)
        assert set(deployment["parameters"]) <= set(flow.parameters.properties)
        names[f"{flow.name}/{deployment['name']}"] = deployment["work_pool"]["name"]
    assert names == {
        "rl-train/local": "sluice-local",
        "rl-train/gpu": "sluice-gpu",
        "rl-iteration/one-shot": "sluice-local",
        "rl-evaluate/checkpoint": "sluice-local",
        "rl-gc/artifacts": "sluice-local",
    }


@pytest.mark.parametrize("name", ["local", "gpu"])
def test_default_configurations_are_valid(name: str) -> None:
    [one] = [d for d in PREFECT["deployments"] if d["name"] == name]
    config = build_config(places(one["parameters"]["config"]))
    assert config.storage.root == "/places/SLUICE_ROOT"


def test_the_local_default_is_the_quickstart() -> None:
    from rlcore.config import load_config

    [one] = [d for d in PREFECT["deployments"] if d["name"] == "local"]
    text = json.dumps(one["parameters"]["config"])
    text = text.replace("{{ $SLUICE_EXAMPLES }}", str(shipped("examples")))
    quickstart = shipped("examples") / "quickstart" / "run.toml"
    expected = load_config(quickstart, ["storage.root='{{ $SLUICE_ROOT }}'"])
    found = RunConfig.model_validate(json.loads(text))
    assert found.model_copy(update={"storage": expected.storage}) == expected


# --- automations ----------------------------------------------------------------------------------


def test_automations_are_prefect_s() -> None:
    parsed = {a["name"]: AutomationCore.model_validate(a) for a in automations()}
    assert set(parsed) == {"sluice-zombies", "sluice-stuck-pending", "sluice-resume"}
    resume = parsed["sluice-resume"].actions[0]
    assert (resume.state.value, resume.force) == ("SCHEDULED", True)
    zombies = parsed["sluice-zombies"].trigger
    # Three heartbeats may be missed, and the worker's are 30 seconds apart.
    assert zombies.within.total_seconds() >= 3 * 30
    for one in automations():
        related = one["trigger"]["match_related"]
        assert {"prefect.resource.role": "flow", "prefect.resource.name": "rl-train"} in related
        tag = {"prefect.resource.role": "tag", "prefect.resource.id": "prefect.tag.sluice"}
        # Not the deployment's name, which a heartbeat does not carry.
        assert tag in related
        assert len(related) == 2


def test_a_busy_server_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    class Busy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal asked
            asked += 1
            assert self.rfile.read(int(self.headers["Content-Length"])) == b'{"a":1}'
            self.send_response(503 if asked < 3 else 201)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(deploy, "BUSY_PAUSES_S", (0.0, 0.0, 0.0))
    server = HTTPServer(("127.0.0.1", 0), Busy)
    Thread(target=server.serve_forever, daemon=True).start()
    with deploy.client(f"http://127.0.0.1:{server.server_port}") as api:
        assert api.post("/x", json={"a": 1}).status_code == 201
    server.shutdown()
    assert asked == 3


# --- job templates --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", POOLS)
def test_job_templates_use_the_variables_that_they_declare(kind: str) -> None:
    template = json.loads((FOLDER / "pools" / f"{kind}.json").read_text())
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    declared = template["variables"]["properties"]
    assert used == set(declared)
    assert all(one["description"] and one["title"] for one in declared.values())


def test_the_process_template_has_what_prefect_s_has() -> None:
    ours = json.loads((FOLDER / "pools" / "process.json").read_text())
    theirs = ProcessWorker.get_default_base_job_template()
    assert ours["job_configuration"] == theirs["job_configuration"]
    assert set(ours["variables"]["properties"]) == set(theirs["variables"]["properties"])


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("docker", "prefect_docker.worker", "DockerWorker"),
        ("kubernetes", "prefect_kubernetes", "KubernetesWorker"),
    ],
)
async def test_the_worker_s_own_class_takes_the_template(kind: str, module: str, name: str) -> None:
    worker = getattr(pytest.importorskip(module), name)
    template = json.loads((FOLDER / "pools" / f"{kind}.json").read_text())
    class_ = worker.job_configuration
    made = await class_.from_template_and_values(template, {"image": "sluice:1"}, client=object())
    assert set(template["job_configuration"]) <= set(class_.model_fields)
    assert "sluice:1" in made.model_dump_json()


# --- compose --------------------------------------------------------------------------------------


def test_compose_refers_only_to_what_is_there() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in services, f"{name} needs {needed}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in services[needed], f"{name} waits for {needed}"
        assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        volumes = {v.split(":")[0] for v in service.get("volumes", []) if v[0] not in "./"}
        assert volumes <= set(COMPOSE["volumes"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} opens {port}"
    assert {"postgres", "redis", "prefect", "s3", "ray-head", "worker"} <= set(services)


def test_images_are_pinned() -> None:
    images = {s["image"] for s in COMPOSE["services"].values()}
    images |= {c["image"] for c in containers()}
    for image in images - {"sluice"}:
        assert image.startswith("${SLUICE_IMAGE:?") or re.search(r":\d", image), image


# --- Kubernetes -----------------------------------------------------------------------------------


def pods(tree: Any) -> Iterator[dict[str, Any]]:
    """The specs of all pods in a tree of manifests."""
    if isinstance(tree, dict):
        if "containers" in tree:
            yield tree
        for value in tree.values():
            yield from pods(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from pods(value)


def containers() -> list[dict[str, Any]]:
    return [
        c for pod in pods(DOCUMENTS) for c in (*pod["containers"], *pod.get("initContainers", []))
    ]


def test_kustomization_names_every_file() -> None:
    listed = yaml.safe_load((FOLDER / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    there = {p.name for p in (FOLDER / "kubernetes").glob("*.yaml")}
    assert set(listed) == there - {"kustomization.yaml"}


def test_manifests_have_a_kind_and_a_name_of_their_own() -> None:
    names = [(d["apiVersion"], d["kind"], d["metadata"]["name"]) for d in DOCUMENTS]
    assert len(names) == len(set(names)) > 12


def test_containers_have_limits_and_what_serves_has_probes() -> None:
    served = {
        d["spec"]["template"]["metadata"]["labels"]["app"]
        for d in DOCUMENTS
        if d["kind"] in ("Deployment", "StatefulSet")
    }
    for document in DOCUMENTS:
        for pod in pods(document):
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            volumes = {v["name"] for v in pod.get("volumes", [])}
            claims = document["spec"].get("volumeClaimTemplates", [])
            volumes |= {c["metadata"]["name"] for c in claims}
            for container in (*pod["containers"], *pod.get("initContainers", [])):
                what = f"{document['metadata']['name']}/{container['name']}"
                assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, what
                assert "memory" in container["resources"]["limits"], what
                mounted = {m["name"] for m in container.get("volumeMounts", [])}
                assert mounted <= volumes, what
            if document["kind"] in ("Deployment", "StatefulSet"):
                assert all("livenessProbe" in c for c in pod["containers"])
    for document in DOCUMENTS:
        if document["kind"] == "Service":
            assert document["spec"]["selector"]["app"] in served
        if document["kind"] in ("Deployment", "StatefulSet"):
            spec = document["spec"]
            assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def test_configuration_that_is_referred_to_is_there() -> None:
    maps = {d["metadata"]["name"] for d in DOCUMENTS if d["kind"] == "ConfigMap"}
    accounts = {d["metadata"]["name"] for d in DOCUMENTS if d["kind"] == "ServiceAccount"}
    text = (FOLDER / "kubernetes" / "kustomization.yaml").read_text()
    made = set(re.findall(r"create secret generic (\S+)", text))
    pool = json.loads((FOLDER / "pools" / "kubernetes.json").read_text())
    defaults = {k: v.get("default") for k, v in pool["variables"]["properties"].items()}
    assert {defaults["store_secret"], defaults["ray_secret"]} <= made
    assert defaults["service_account_name"] in accounts
    assert set(find("configMapRef", "name")) | {"sluice"} <= maps
    assert {*find("secretKeyRef", "name"), *find("secretRef", "name")} <= made
    assert set(find("secret", "secretName")) <= made


def find(key: str, inner: str) -> list[str]:
    """The values of `key: {inner: VALUE}` anywhere in the manifests."""

    def walk(tree: Any) -> Iterator[str]:
        if isinstance(tree, dict):
            if isinstance(tree.get(key), dict) and inner in tree[key]:
                yield tree[key][inner]
            for value in tree.values():
                yield from walk(value)
        elif isinstance(tree, list):
            for value in tree:
                yield from walk(value)

    return list(walk(DOCUMENTS))


def test_ray_is_the_version_that_is_pinned() -> None:
    [cluster] = [d for d in DOCUMENTS if d["kind"] == "RayCluster"]
    pins = (FOLDER.parent / "constraints.txt").read_text()
    assert f"ray=={cluster['spec']['rayVersion']}\n" in pins


# --- all of it ------------------------------------------------------------------------------------


def variables() -> Iterator[tuple[str, str]]:
    """Environment variables and their values, in the compose file and the manifests."""
    for service in COMPOSE["services"].values():
        yield from service.get("environment", {}).items()
    for document in DOCUMENTS:
        if document["kind"] == "ConfigMap":
            yield from document["data"].items()
    for container in containers():
        yield from ((e["name"], e["value"]) for e in container.get("env", []) if "value" in e)


def test_prefect_knows_every_setting() -> None:
    known = set(_get_settings_fields(Settings))
    names = {name for name, _ in variables() if name.startswith("PREFECT_")}
    assert len(names) > 15
    # prefect-redis has settings of its own.
    assert {n for n in names if not n.startswith("PREFECT_REDIS_")} <= known


def test_no_secret_has_a_value() -> None:
    for name, value in variables():
        if SECRET_WORD.search(name) and not name.endswith(("_PATH", "_MODE")):
            assert value.startswith("${"), f"{name} has a value"
    for path in FOLDER.rglob("*"):
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"[0-9a-f]{32}|BEGIN [A-Z ]*PRIVATE|://[^/\s:$]+:[^@\s$]+@", text)
    assert {d["kind"] for d in DOCUMENTS}.isdisjoint({"Secret"})


def test_the_entrypoint_can_be_run() -> None:
    assert os.access(FOLDER / "docker" / "with-ray", os.X_OK)
