"""The record of a published version: which tensors it has, and where their changes lie.

Invariants:
- A record is known by the digest of its bytes, and never changes.
- `chain` names every version that it builds on, from a whole one: what a reader without any of them
  needs.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from rlcore.errors import Corrupt, NotFound
from rlcore.store.manifest import FileRef, Key, canonical_json, sha256_hex
from rlcore.store.objects import Objects
from rlcore.store.paths import delta_head_key


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class IndexRef(_Frozen):
    """A published version, by its record."""

    key: Key
    sha256: str

    @property
    def prefix(self) -> str:
        """The folder that holds its record and changes."""
        return self.key.rpartition("/")[0]


class TensorChange(_Frozen):
    """What became of one tensor."""

    name: str
    dtype: str
    """As safetensors and torch name it: `bfloat16`."""
    shape: tuple[int, ...]
    part: int
    """Number of the file."""
    offset: int
    bytes: int
    whole: bool
    """The changes are to zeros, not to the version before."""
    sha256: str
    """Of the tensor's bytes in this version."""


class Index(_Frozen):
    """A published version."""

    version: str
    """That engines report."""
    config: str
    """The model's config.json."""
    chain: tuple[IndexRef, ...] = ()
    """The versions that it builds on, the whole one first; none: it is whole itself."""
    parts: tuple[FileRef, ...] = ()
    tensors: tuple[TensorChange, ...] = ()


def write_index(objects: Objects, prefix: str, index: Index) -> IndexRef:
    """Store a record below a folder of its own."""
    data = canonical_json(index.model_dump(mode="json"))
    ref = IndexRef(key=f"{prefix}/index.json", sha256=sha256_hex(data))
    objects.put(ref.key, data)
    return ref


def read_index(objects: Objects, ref: IndexRef) -> Index:
    """A record.

    Raises:
        Corrupt: it is missing, or not the one that was meant.
    """
    try:
        data = objects.get(ref.key)
    except NotFound:
        raise Corrupt(f"{objects.url(ref.key)} is missing; a later version builds on it") from None
    if sha256_hex(data) != ref.sha256:
        raise Corrupt(f"{objects.url(ref.key)} is not the record with sha256 {ref.sha256[:12]}")
    return Index.model_validate_json(data)


def write_head(objects: Objects, run_id: str, ref: IndexRef) -> None:
    """Note the newest version of a run, for a trainer that was started again and for `gc`."""
    objects.put(delta_head_key(run_id), canonical_json(ref.model_dump(mode="json")))


def read_head(objects: Objects, run_id: str) -> IndexRef | None:
    """The newest version of a run; None: there is none that can be read."""
    try:
        return IndexRef.model_validate_json(objects.get(delta_head_key(run_id)))
    except (NotFound, ValidationError):
        return None


def delta_keys(objects: Objects, run_id: str) -> set[str]:
    """All that the newest version of a run is made of: the rest is nobody's."""
    head = read_head(objects, run_id)
    if head is None:
        return set()
    keys = {delta_head_key(run_id)}
    try:
        for ref in (*read_index(objects, head).chain, head):
            keys.add(ref.key)
            keys.update(part.key for part in read_index(objects, ref).parts)
    except Corrupt:
        # A mirror could not make it either; the next sync publishes whole weights.
        return {delta_head_key(run_id)}
    return keys
