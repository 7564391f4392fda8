"""s3:// : AWS S3 and servers that speak its protocol, through s3fs.

Invariants:
- Objects appear when their PUT (or multipart upload) completes; until then nobody sees them.
- Conditions are S3's own: `If-None-Match: *` and `If-Match: <etag>`, decided by the server.
- A conditional PUT may be tried again after an answer was lost. Each carries a nonce as object
  metadata, so "already there" with our nonce means that the earlier try arrived: it is ours.
- Transient failures (5xx, throttling, timeouts, refused, reset or cut connections) are tried again
  with back-off until `retry_s` has passed; everything else fails at once.
- A try ends: after `CONNECT_S` without a connection, or `READ_S` without a byte. So a request takes
  at most `retry_s + CONNECT_S + READ_S`, whatever the server does. Large objects are many requests.
- The layers below retry nothing, except that aiohttp sends a PUT again when a connection that was
  kept open turns out closed: so any refusal may be of our own second try, and is looked into.
"""

import io
import logging
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import botocore.exceptions as boto
import fsspec
from aiohttp import ClientError as HttpError
from fsspec import AbstractFileSystem
from fsspec.asyn import sync

from rlcore.errors import NotFound, StoreAway, StoreError
from rlcore.store.objects import Objects, Option, check_key
from rlcore.store.s3_transfer import BLOCK, NONCE, Reader, Upload

T = TypeVar("T")
log = logging.getLogger("sluice.store")

CONNECT_S, READ_S = 5, 20
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_TRANSIENT_CODES = frozenset(
    {
        "SlowDown",
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "RequestTimeTooSkewed",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "OperationAborted",
        "ConditionalRequestConflict",
    }
)
_TRANSIENT_ERRORS = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    HttpError,
    ConnectionError,
    TimeoutError,
)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
# The global generator belongs to whoever seeded it.
_jitter = random.Random()


class S3Objects(Objects):
    """The store under a prefix of a bucket."""

    reads_may_be_stale = True

    def __init__(self, url: str, options: Mapping[str, Option] | None, retry_s: float) -> None:
        bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
        if not bucket:
            raise StoreError(f"{url} names no bucket; write s3://bucket/prefix")
        super().__init__(f"s3://{bucket}/{prefix}".rstrip("/"), options, retry_s)
        self._bucket, self._prefix = bucket, prefix
        arguments: dict[str, Any] = dict(self._options)
        if "region_name" in arguments:
            arguments["client_kwargs"] = {"region_name": arguments.pop("region_name")}
        self._fs = fsspec.filesystem(
            "s3",
            **arguments,
            config_kwargs={
                "retries": {"mode": "standard", "total_max_attempts": 1},
                "connect_timeout": CONNECT_S,
                "read_timeout": READ_S,
                "max_pool_connections": 32,
            },
            use_listings_cache=False,
        )
        self._fs.retries = 1

    @property
    def filesystem(self) -> AbstractFileSystem:
        return self._fs

    def read_with_tag(self, key: str) -> tuple[bytes, str]:
        address = self._address(key)

        async def read() -> tuple[bytes, str]:
            answer = await self._fs._call_s3("get_object", **address)
            async with answer["Body"] as body:
                return await body.read(), answer["ETag"]

        return self._try(key, lambda: cast(tuple[bytes, str], sync(self._fs.loop, read)))

    def put(self, key: str, data: bytes) -> None:
        self.request(key, "put_object", Body=data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._put_on_condition(key, data, IfNoneMatch="*")

    def compare_and_swap(self, key: str, data: bytes, tag: str | None) -> bool:
        if tag is None:
            return self.put_if_absent(key, data)
        return self._put_on_condition(key, data, IfMatch=tag)

    @contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        check_key(key)
        upload = Upload(self, key)
        try:
            yield cast(BinaryIO, upload)
            upload.finish()
        except BaseException:
            upload.give_up()
            raise

    def open_read(self, key: str) -> BinaryIO:
        head = self._head(key)
        reader = Reader(self, key, int(head["ContentLength"]), head["ETag"])
        return cast(BinaryIO, io.BufferedReader(reader, 1 << 16))

    def upload(self, local_path: str | Path, key: str) -> None:
        path = Path(local_path)
        if not path.is_file():
            raise NotFound(
                f"{local_path} does not exist, so it cannot be stored as {self.url(key)}"
            )
        upload = Upload(self, check_key(key), expected=path.stat().st_size)
        try:
            with path.open("rb") as source:
                shutil.copyfileobj(source, cast(BinaryIO, upload), BLOCK)
            upload.finish()
        except BaseException:
            upload.give_up()
            raise

    def download(self, key: str, local_path: str | Path) -> None:
        partial = f"{local_path}.{uuid.uuid4().hex}.tmp"
        try:
            with self.open_read(key) as source, open(partial, "xb") as target:
                shutil.copyfileobj(source, target, BLOCK)
            os.replace(partial, local_path)
        finally:
            Path(partial).unlink(missing_ok=True)

    def request(self, key: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One request about a key, again while it fails for reasons that pass."""
        whole = self._address(key) | arguments
        return self._try(key, lambda: cast(dict[str, Any], self._fs.call_s3(method, **whole) or {}))

    def read_range(self, key: str, start: int, end: int, tag: str) -> bytes:
        """The bytes [start, end) of the content that `tag` names."""
        address = self._address(key) | {"Range": f"bytes={start}-{end - 1}", "IfMatch": tag}

        async def read() -> bytes:
            answer = await self._fs._call_s3("get_object", **address)
            async with answer["Body"] as body:
                data: bytes = await body.read()
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes came of {end - start}")
            return data

        return self._try(key, lambda: cast(bytes, sync(self._fs.loop, read)))

    def size(self, key: str) -> int:
        return int(self._head(key)["ContentLength"])

    def exists(self, key: str) -> bool:
        try:
            self._head(key)
        except NotFound:
            return False
        return True

    def delete(self, key: str) -> None:
        self.request(key, "delete_object")

    def delete_tree(self, prefix: str) -> None:
        paths = [self._path(key) for key in self.list(prefix)]
        if paths:
            self._try(prefix, lambda: self._fs.rm(paths))

    def children(self, prefix: str) -> list[str]:
        folder = self._path(prefix)
        try:
            found = self._try(prefix, lambda: self._fs.ls(folder, detail=True))
        except NotFound:
            return []
        return sorted(
            e["name"].rstrip("/").rsplit("/", 1)[-1] for e in found if e["type"] == "directory"
        )

    def _path(self, key: str) -> str:
        return self.url(key).removeprefix("s3://")

    def _address(self, key: str) -> dict[str, str]:
        name = check_key(key)
        return {"Bucket": self._bucket, "Key": f"{self._prefix}/{name}" if self._prefix else name}

    def _head(self, key: str) -> dict[str, Any]:
        return self.request(key, "head_object")

    def _put_on_condition(self, key: str, data: bytes, **condition: str) -> bool:
        nonce = uuid.uuid4().hex
        request = self._address(key) | condition
        tries = 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            try:
                self._fs.call_s3("put_object", Body=data, Metadata={NONCE: nonce}, **request)
            except Exception as error:
                if _is_refused(error, condition):
                    return False
                raise
            return True

        if self._try(key, attempt):
            return True
        try:
            metadata = self._head(key)["Metadata"]
            if NONCE in metadata:
                return bool(metadata[NONCE] == nonce)
            # A server that keeps no metadata: equal bytes are ours if an earlier try may be.
            return tries > 1 and self.get(key) == data
        except NotFound:
            return False

    def _try(self, key: str, act: Callable[[], T]) -> T:
        """Do it, again while it fails for reasons that pass; else say in a sentence why not."""
        until = time.monotonic() + self._retry_s
        wait = _FIRST_WAIT_S
        while True:
            try:
                return act()
            except Exception as error:
                if not _is_transient(error):
                    raise self._sentence(key, error) from error
                if time.monotonic() + wait > until:
                    raise StoreAway(
                        f"{self.url(key)}: the store did not answer for {self._retry_s:.0f} s "
                        f"({_brief(error)}); check that the server is up and that endpoint_url is "
                        "right"
                    ) from error
                log.warning(
                    "%s: %s; trying again in about %.1f s", self.url(key), _brief(error), wait
                )
            time.sleep(wait * (0.5 + _jitter.random()))
            wait = min(2 * wait, _LONGEST_WAIT_S)

    def _sentence(self, key: str, error: Exception) -> StoreError:
        status, code = _answer(error)
        if code == "NoSuchBucket" or "bucket does not exist" in str(error).lower():
            return StoreError(
                f"{self.url(key)}: bucket {self._bucket} does not exist; create it or correct the "
                "root"
            )
        if isinstance(error, FileNotFoundError) or status == 404 or code in _MISSING:
            return NotFound(f"{self.url(key)} does not exist")
        if isinstance(error, PermissionError | boto.NoCredentialsError) or status in (401, 403):
            return StoreError(
                f"{self.url(key)}: access denied ({_brief(error)}); check the credentials "
                "(AWS_ACCESS_KEY_ID, FSSPEC_S3_KEY, ...) and the bucket's policy"
            )
        return StoreError(
            f"{self.url(key)}: {_brief(error)}; check storage.root and storage.options"
        )

    def list(self, prefix: str) -> list[str]:
        folder = self._path(prefix) + "/"
        found = self._try(prefix, lambda: cast("list[str]", self._fs.find(folder)))
        start = len(self._path("x")) - 1
        return sorted(path[start:] for path in found if path.startswith(folder))


def _answer(error: BaseException) -> tuple[int | None, str | None]:
    """HTTP status and S3 error code of the server's answer, if the error comes from one."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, response.get("Error", {}).get("Code")
        seen = seen.__cause__
    return None, None


def _is_refused(error: Exception, condition: Mapping[str, str]) -> bool:
    """Whether the server found the condition of a PUT not met."""
    if isinstance(error, FileExistsError):
        return True
    status, code = _answer(error)
    if status == 412 or code == "PreconditionFailed" or "pre-condition" in str(error).lower():
        return True
    gone = (status == 404 or code in _MISSING) and code != "NoSuchBucket"
    return "IfMatch" in condition and gone


def _is_transient(error: BaseException) -> bool:
    status, code = _answer(error)
    if status is not None or code is not None:
        return code in _TRANSIENT_CODES or status in (409, 429) or (status or 0) >= 500
    return isinstance(error, _TRANSIENT_ERRORS)


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
