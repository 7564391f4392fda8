"""Put Sluice's work pools, deployments and automations on a Prefect server.

    python -m flows.operation.deploy KIND NAME...

With PREFECT_API_URL set: the work pool of that kind (process, docker, kubernetes), these
deployments of prefect.yaml, and the automations.

Invariants:
- Applying twice changes nothing: each object is found by its name and updated.
- What is applied lies in `deployments/`; nothing is defined here.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from rlcore.errors import ClusterError, ConfigError, SluiceError

POOLS = {"process": "sluice-local", "docker": "sluice-gpu", "kubernetes": "sluice-gpu"}
TIMEOUT_S = 60.0
DEPLOY_TIMEOUT_S = 300.0
BUSY_PAUSES_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


def shipped(name: str) -> Path:
    """A folder that comes with Sluice: beside the packages in a checkout, inside them once
    installed.
    """
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / name
    return beside if beside.is_dir() else package / "shipped" / name


def apply_pool(api_url: str, name: str, kind: str) -> None:
    """Create or update a work pool with the base job template of its kind.

    Raises:
        ClusterError: the server did not take it.
    """
    template = json.loads((shipped("deployments") / "pools" / f"{kind}.json").read_text())
    with client(api_url) as api:
        answer = api.get(f"/work_pools/{name}")
        if answer.status_code == 404:
            body = {"name": name, "type": kind, "base_job_template": template}
            check(api.post("/work_pools/", json=body), f"work pool {name}")
        else:
            body = {"base_job_template": template}
            check(api.patch(f"/work_pools/{name}", json=body), f"work pool {name}")


def automations() -> list[dict[str, Any]]:
    """The automations that Sluice ships."""
    text = (shipped("deployments") / "automations.yaml").read_text()
    found: list[dict[str, Any]] = yaml.safe_load(text)
    return found


def apply_automations(api_url: str) -> None:
    """Create or update the automations.

    Raises:
        ClusterError: the server did not take one.
    """
    with client(api_url) as api:
        for automation in automations():
            name = automation["name"]
            query = {"automations": {"name": {"any_": [name]}}}
            found = check(api.post("/automations/filter", json=query), "automations").json()
            if found and says(found[0], automation):
                # Written again it would forget what it has seen, and so miss who died since.
                continue
            if found:
                answer = api.put(f"/automations/{found[0]['id']}", json=automation)
            else:
                answer = api.post("/automations/", json=automation)
            check(answer, f"automation {name}")


def says(there: Any, wanted: Any) -> bool:
    """Whether a server's object has all that is wanted of it, whatever else it has."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(says(there.get(k), v) for k, v in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(there, list) or len(there) != len(wanted):
            return False
        # A server keeps no order where none is meant.
        return all(any(says(t, w) for t in there) for w in wanted)
    return bool(there == wanted)


def apply_deployments(
    api_url: str, names: Sequence[str], env: Mapping[str, str], home: Path | None
) -> None:
    """Deploy some of `deployments/prefect.yaml`, as `prefect deploy` does.

    Args:
        api_url: of the server.
        names: of deployments, without their flows'.
        env: what the file's `{{ $NAME }}` stand for, beside this process's environment.
        home: Prefect's folder for the command; None: as the environment says.

    Raises:
        ClusterError: the command failed; the error ends with what it said.
    """
    file = shipped("deployments") / "prefect.yaml"
    argv = [sys.executable, "-P", "-m", "prefect", "--no-prompt", "deploy"]
    argv += ["--prefect-file", str(file)]
    argv += [part for name in names for part in ("--name", name)]
    own = {"PREFECT_HOME": str(home)} if home is not None else {}
    done = subprocess.run(
        argv,
        env=os.environ | dict(env) | {"PREFECT_API_URL": api_url} | own,
        capture_output=True,
        text=True,
        timeout=DEPLOY_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise ClusterError(f"prefect deploy of {', '.join(names)} failed: {said}")


class Patient(httpx.HTTPTransport):
    """Asks again where a server answers 503, as one on SQLite does while its database is locked."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        for pause in BUSY_PAUSES_S:
            answer = super().handle_request(request)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return answer
            answer.close()
            time.sleep(pause)
        return super().handle_request(request)


def client(api_url: str) -> httpx.Client:
    """A client of a server's API that is patient with it."""
    return httpx.Client(base_url=api_url, timeout=TIMEOUT_S, transport=Patient())


def check(answer: httpx.Response, what: str) -> httpx.Response:
    """The answer, if it is a good one."""
    if answer.is_error:
        raise ClusterError(
            f"Prefect's server refused {what}: {answer.status_code} {answer.text[:500]}"
        )
    return answer


def main(kind: str, names: Sequence[str]) -> None:
    """Put a pool, deployments and the automations on the server that the environment names.

    Raises:
        ConfigError: the environment lacks what prefect.yaml takes from it.
        ClusterError: the server did not take something.
    """
    places = {
        "SLUICE_EXAMPLES": str(shipped("examples")),
        "SLUICE_HOME": str(Path.home()),
        "SLUICE_QUEUE": "default",
    }
    env = places | os.environ
    needed = ["PREFECT_API_URL", "SLUICE_ROOT", *(["SLUICE_IMAGE"] if kind != "process" else [])]
    if missing := [name for name in needed if not env.get(name)]:
        raise ConfigError(f"set {' and '.join(missing)} in the environment")
    if kind not in POOLS:
        raise ConfigError(f"{kind!r} is no kind of pool; there are {', '.join(POOLS)}")
    api_url = env["PREFECT_API_URL"]
    apply_pool(api_url, POOLS[kind], kind)
    apply_deployments(api_url, names, env, home=None)
    apply_automations(api_url)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2:])
    except (SluiceError, IndexError) as error:
        sys.exit(f"error: {error}\n{__doc__}")
