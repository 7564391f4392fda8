"""Two real S3 servers for tests: moto's and SeaweedFS, each with the bucket `runs`.

They listen on free loopback ports, die with the test process, and are ended by their process id.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import boto3
from botocore.config import Config

from rlcore.with_parent import with_parent

KEY, SECRET = "test", "testsecret"


@dataclass(frozen=True)
class Server:
    """A running S3 server."""

    endpoint: str
    process: subprocess.Popen[bytes]

    @property
    def options(self) -> dict[str, str | int | float | bool]:
        return {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
            "region_name": "us-east-1",
        }

    @property
    def conf(self) -> dict[str, str]:
        """For `fsspec.config.conf["s3"]` of this process: what the variables of `env` say."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}

    def env(self, home: Path) -> dict[str, str]:
        """What a command needs in its environment to reach the server, with a home of its own."""
        return {
            "FSSPEC_S3_KEY": KEY,
            "FSSPEC_S3_SECRET": SECRET,
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
            "HOME": str(home),
        }


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def start(argv: list[str], port: int, log: Path) -> Server:
    with log.open("wb") as out:
        process = subprocess.Popen(with_parent(argv), stdout=out, stderr=out)
    server = Server(f"http://127.0.0.1:{port}", process)
    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
    )
    until = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="runs")
            return server
        except client.exceptions.BucketAlreadyOwnedByYou:
            return server
        except Exception as error:
            if process.poll() is not None or time.monotonic() > until:
                stop(process)
                raise AssertionError(
                    f"{argv[0]} did not start: {log.read_text()[-2000:]}"
                ) from error
            time.sleep(0.1)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@contextmanager
def moto_server(folder: Path) -> Iterator[Server]:
    """Moto's server, in memory, its log in `folder`."""
    (port,) = free_ports(1)
    argv = [str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(port)]
    server = start(argv, port, folder / "log")
    try:
        yield server
    finally:
        stop(server.process)


@contextmanager
def seaweed_server(folder: Path) -> Iterator[Server]:
    """SeaweedFS with its data and log in `folder`."""
    names = (
        "s3",
        "s3.grpc",
        "master",
        "master.grpc",
        "volume",
        "volume.grpc",
        "filer",
        "filer.grpc",
    )
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    identities = [{"name": "t", "credentials": credentials, "actions": ["Admin", "Read", "Write"]}]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    argv = [
        str(Path(sys.executable).with_name("weed")),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-s3",
        f"-s3.config={folder / 's3.json'}",
        f"-s3.port={ports['s3']}",
        f"-s3.port.grpc={ports['s3.grpc']}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.iam=false",
        "-s3.autoCreateBucket=false",
        f"-master.port={ports['master']}",
        f"-master.port.grpc={ports['master.grpc']}",
        f"-volume.port={ports['volume']}",
        f"-volume.port.grpc={ports['volume.grpc']}",
        f"-filer.port={ports['filer']}",
        f"-filer.port.grpc={ports['filer.grpc']}",
        "-volume.max=20",
        "-master.volumeSizeLimitMB=64",
        "-master.telemetry=false",
    ]
    server = start(argv, ports["s3"], folder / "log")
    try:
        yield server
    finally:
        stop(server.process)
