"""Roots to run the store's tests on: a folder, memory, and two real S3 servers.

What objects promise is tested on all of them; what is built of objects on moto by the slow tests
alone, for it answers slowly and SeaweedFS is the same to them.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_servers import Server, moto_server, seaweed_server

from rlcore.store.objects import Objects

OF_OBJECTS = ("test_objects.py", "test_s3.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make those slow that repeat on moto what others do on SeaweedFS."""
    for item in items:
        params = getattr(item, "callspec", None) and item.callspec.params  # type: ignore[attr-defined]
        on_moto = params and "moto" in (params.get("objects"), params.get("shared"))
        if on_moto and item.path.name not in OF_OBJECTS:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with seaweed_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(params=["moto", "seaweed"])
def s3(request: pytest.FixtureRequest) -> Server:
    """Each of the two servers in turn."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(params=["file", "memory", "moto", "seaweed"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """An empty root of each kind in turn."""
    name = uuid.uuid4().hex
    if request.param == "file":
        return Objects.open(tmp_path / "root")
    if request.param == "memory":
        return Objects.open(f"memory://{name}")
    server: Server = request.getfixturevalue(request.param)
    return Objects.open(f"s3://runs/{name}", server.options, retry_s=20)


@pytest.fixture(params=["file", "moto", "seaweed"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    """A root that several processes can open."""
    if request.param == "file":
        return Objects.open(tmp_path / "root")
    server: Server = request.getfixturevalue(request.param)
    return Objects.open(f"s3://runs/{uuid.uuid4().hex}", server.options, retry_s=20)


@pytest.fixture
def disk(tmp_path: Path) -> Objects:
    """A folder."""
    return Objects.open(tmp_path / "root")
