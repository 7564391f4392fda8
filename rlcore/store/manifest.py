"""What a committed stage says of itself.

Invariants:
- A manifest is canonical JSON (sorted keys, no spaces, UTF-8); its digest is the SHA-256 of those
  bytes, and that digest is how later stages name it as an input.
- A file that a manifest does not name does not exist, whatever lies in the folder.
- A manifest of another schema version is refused, never guessed at.

What the stages put into the open fields is listed in `lineage`, which relies on it.
"""

import hashlib
import json
import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from rlcore.errors import Corrupt, StoreError
from rlcore.store.paths import RUNS

SCHEMA_VERSION = 1
_ONE_EXECUTION = re.compile(rf"{RUNS}/[^/]+/(base|it/\d+/[^/]+)/[^/]+(/.+)?")
"""A folder that one execution of a stage has written, or of the making of a fork."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _below_the_root(key: str) -> str:
    """Refuse a key that a hand, or a store that somebody else can write to, may have made."""
    from rlcore.store.objects import check_key

    try:
        return check_key(key)
    except StoreError as error:
        raise ValueError(error.message) from None


Key = Annotated[str, AfterValidator(_below_the_root)]
"""Of the store: it stays below the root."""


class FileRef(_Frozen):
    """One file of the store, with what proves that it is whole."""

    key: Key
    bytes: int
    rows: int = 0
    """Rows of a Parquet file; 0 for other files."""
    sha256: str


class StageRef(_Frozen):
    """A committed stage: small enough to be a task's argument."""

    run_id: str
    iteration: int
    stage: str
    key: Key
    sha256: str
    """Of the manifest's bytes."""
    rows: int = 0
    policy_version: int | None = None


class Manifest(_Frozen):
    """The record whose presence says that a stage is done."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    iteration: int
    stage: str
    files: tuple[FileRef, ...] = ()
    inputs: dict[str, str] = {}
    """Name of each input -> SHA-256 of its manifest."""
    config_digest: str
    epoch: int
    """Lease epoch of the driver that committed."""
    attempt: str
    policy_version: int | None = None
    cursor: dict[str, Any] | None = None
    rng: dict[str, Any] | None = None
    metrics: dict[str, float] = {}
    extra: dict[str, Any] = {}
    """What this stage alone has to say."""
    timings: dict[str, float] = {}
    """Seconds by name; `seconds` is the whole stage."""
    created: str = Field(default_factory=lambda: utc_now())

    @model_validator(mode="after")
    def _folders_are_attempts(self) -> "Manifest":
        """A folder that is named here may be removed when it is no longer kept: it must be one."""
        for name, folder in self.extra.items():
            if isinstance(folder, dict) and "key_prefix" in folder:
                prefix = str(folder["key_prefix"])
                if not _ONE_EXECUTION.fullmatch(_below_the_root(prefix)):
                    raise ValueError(
                        f"extra.{name}.key_prefix {prefix!r} is not the folder of one execution"
                    )
        return self

    def to_bytes(self) -> bytes:
        """The canonical bytes that are stored and digested."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> "Manifest":
        """The inverse of `to_bytes`; `where` is the address that errors name.

        Raises:
            StoreError: another schema version.
            Corrupt: torn, or not a manifest.
        """
        tree = parse_record(data, where)
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(step) for step in first["loc"])
            raise Corrupt(f"{where} is not a manifest: {field or 'root'}: {first['msg']}") from None

    def ref(self, key: str, data: bytes) -> StageRef:
        """The reference to this manifest, stored under `key` as `data`."""
        return StageRef(
            run_id=self.run_id,
            iteration=self.iteration,
            stage=self.stage,
            key=key,
            sha256=sha256_hex(data),
            rows=sum(file.rows for file in self.files),
            policy_version=self.policy_version,
        )


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def sha256_hex(data: bytes) -> str:
    """SHA-256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(tree: Any) -> bytes:
    """Equal values give equal bytes: sorted keys, no spaces, UTF-8.

    JSON has no infinities and no NaN: they become the texts "Infinity", "-Infinity" and "NaN",
    which a manifest's float fields read back.

    Raises:
        StoreError: a value has no JSON form.
    """
    try:
        text = json.dumps(
            _finite(tree),
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
        )
        return text.encode()
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"a record for the store has no JSON form: {error}; use numbers, texts, lists, dicts"
        ) from None


def parse_record(data: bytes, where: str) -> dict[str, Any]:
    """A stored JSON record with a known `schema_version`.

    Raises:
        StoreError: another schema version.
        Corrupt: not a JSON object, or one without a version.
    """
    try:
        tree = json.loads(data)
    except ValueError as error:
        raise Corrupt(f"{where} is torn: {len(data)} bytes that are no JSON ({error})") from None
    if not isinstance(tree, dict):
        raise Corrupt(f"{where} is not a JSON object")
    if "schema_version" not in tree:
        raise Corrupt(f"{where} is no record: it has no schema_version")
    found = tree["schema_version"]
    if found != SCHEMA_VERSION:
        raise StoreError(
            f"{where} has schema version {found!r}, expected {SCHEMA_VERSION}; read it with the "
            "version of Sluice that wrote it"
        )
    return tree


def chain_state_id(prev: str, batch_shas: list[str], config_digest: str) -> str:
    """Identity of a trainer state: what it was made from.

    Args:
        prev: state_id before; of the start, whatever names the start model.
        batch_shas: SHA-256 of the manifests that the batch consists of, in a fixed order.
        config_digest: digest of what the train stage computes.

    Returns:
        SHA-256 of the canonical JSON [prev, batch_shas, config_digest].
    """
    return sha256_hex(canonical_json([prev, batch_shas, config_digest]))


def _finite(tree: Any) -> Any:
    if isinstance(tree, float) and not math.isfinite(tree):
        return "NaN" if math.isnan(tree) else "Infinity" if tree > 0 else "-Infinity"
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return tree
