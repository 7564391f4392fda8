"""Files by reference: stored with their digest, and believed only when the digest agrees.

A damaged file is missing, has another length, or has other bytes; each is said with the file's
name.
"""

import hashlib
from pathlib import Path
from typing import BinaryIO

from rlcore.errors import Corrupt, NotFound
from rlcore.store.manifest import FileRef
from rlcore.store.objects import Objects

_CHUNK = 1 << 20


def digest_stream(stream: BinaryIO) -> tuple[int, str]:
    """Length and SHA-256 of what is left to read."""
    digest, size = hashlib.sha256(), 0
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
        size += len(chunk)
    return size, digest.hexdigest()


def file_ref(path: Path, key: str) -> FileRef:
    """Reference to a local file that lies, or will lie, under `key`."""
    with path.open("rb") as file:
        size, digest = digest_stream(file)
    return FileRef(key=key, bytes=size, sha256=digest)


def upload_file(objects: Objects, path: Path, key: str) -> FileRef:
    """Store a local file."""
    ref = file_ref(path, key)
    objects.upload(path, key)
    return ref


def upload_folder(objects: Objects, folder: Path, prefix: str) -> list[FileRef]:
    """Store all files below a local folder under `prefix`, in the order of their names.

    Files that already lie there, since the trainer wrote them in place, are digested and left.
    """
    refs = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        key = f"{prefix}/{path.relative_to(folder).as_posix()}"
        in_place = objects.local_path(key) == path.absolute()
        refs.append(file_ref(path, key) if in_place else upload_file(objects, path, key))
    return refs


def download_folder(objects: Objects, refs: list[FileRef], prefix: str, folder: Path) -> None:
    """Fetch files stored by `upload_folder` into a local folder.

    Raises:
        Corrupt: a file is damaged.
    """
    for ref in refs:
        target = folder / ref.key.removeprefix(f"{prefix}/")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            objects.download(ref.key, target)
        except NotFound:
            raise Corrupt(f"{objects.url(ref.key)} is missing; its manifest names it") from None
        got = file_ref(target, ref.key)
        if (got.bytes, got.sha256) != (ref.bytes, ref.sha256):
            target.unlink()
            raise Corrupt(damage_text(objects, ref, got.bytes, got.sha256))


def find_damage(objects: Objects, ref: FileRef) -> str | None:
    """What is wrong with a stored file, as a sentence; None if it is as its reference says."""
    try:
        size = objects.size(ref.key)
        if size != ref.bytes:
            return damage_text(objects, ref, size, None)
        with objects.open_read(ref.key) as file:
            size, digest = digest_stream(file)
    except NotFound:
        return f"{objects.url(ref.key)} is missing"
    if (size, digest) != (ref.bytes, ref.sha256):
        return damage_text(objects, ref, size, digest)
    return None


def damage_text(objects: Objects, ref: FileRef, size: int, digest: str | None) -> str:
    """The sentence for a file that is there and differs."""
    if size != ref.bytes:
        return f"{objects.url(ref.key)} has {size} bytes, its manifest says {ref.bytes}"
    return f"{objects.url(ref.key)} has sha256 {digest}, its manifest says {ref.sha256}"
