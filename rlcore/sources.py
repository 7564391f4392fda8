"""The files that a run is made from, known by their content: data, model, the user's functions.

A configuration names them by path. A digest of each, taken when the run was made, tells later
whether a path still holds the same, here or on another machine.

Invariants:
- Data or a model that changed under a run is an error: its prompts and its start would be others.
- A function that changed is told and goes into the record of the driver that used it, since mending
  one is why many a run is resumed.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.digest import NOT_COMPUTED
from rlcore.config.fields import PathValue, path_values
from rlcore.data.rows import split_slice
from rlcore.errors import ConfigError

log = logging.getLogger("sluice")

WHOLE = 256 * 2**20
"""Files up to this many bytes are read whole; of larger ones, size and samples are digested."""
SAMPLES, SAMPLE = 64, 2**20
"""How many pieces, and how many bytes each."""

Sources = dict[str, str]
"""Name of a setting -> SHA-256 of what its path holds."""


def sources_of(config: RunConfig) -> Sources:
    """Digests of all files and folders that the configuration names and that are there."""
    found = {}
    for path in path_values(config.model_dump(mode="json"), RunConfig):
        place = _place(path)
        if path.name.split(".")[0] not in NOT_COMPUTED and place is not None and place.exists():
            found[path.name] = fingerprint(place)
    return found


def check_sources(run_id: str, made_from: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Compare what a run was made from with what its paths hold now.

    Raises:
        ConfigError: data or a model changed; names the setting.
    """
    for name, digest in made_from.items():
        if now.get(name, digest) == digest:
            continue
        if name.rpartition(".")[2] in ("path", "tokenizer"):
            raise ConfigError(
                f"{name} of run {run_id} holds something else than when the run was made: put the "
                "old content back, or start a new run"
            )
        log.warning(
            "%s of run %s was changed since the run was made: what is committed came from the old "
            "text, what follows comes from the new one",
            name,
            run_id,
        )


def fingerprint(path: Path) -> str:
    """SHA-256 of a file's content, or of the names and contents of a folder's files."""
    if path.is_file():
        return _of_file(path)
    whole = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        whole.update(f"{file.relative_to(path).as_posix()}\0{_of_file(file)}\0".encode())
    return whole.hexdigest()


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        size = path.stat().st_size
        if size <= WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size}\0".encode())
        for offset in _offsets(size):
            file.seek(offset)
            digest.update(file.read(SAMPLE))
        return digest.hexdigest()


def _offsets(size: int) -> Iterator[int]:
    """Where the samples of a large file begin: evenly spread, both ends among them."""
    for k in range(SAMPLES):
        yield k * (size - SAMPLE) // (SAMPLES - 1)


def _place(path: PathValue) -> Path | None:
    if path.kind == "function":
        file = path.value.rpartition(":")[0]
        return Path(file) if file.endswith(".py") else None
    return None if "://" in path.value else Path(split_slice(path.value)[0])
