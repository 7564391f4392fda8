"""Credentials of a store that are named in the configuration and known only to the process.

A configuration names a block of Prefect (`storage.credentials_block`); the flow fetches it and
gives it here. From here it goes into the file system's arguments and nowhere else: not into
`run.json`, parameters or logs.
"""

from collections.abc import Mapping

from rlcore.config.tree import StorageConfig
from rlcore.errors import ConfigError
from rlcore.store.objects import Option

_given: dict[str, dict[str, Option]] = {}


def give(block: str, options: Mapping[str, Option]) -> None:
    """Make the credentials of a block known to this process."""
    _given[block] = dict(options)


def all_options(storage: StorageConfig) -> dict[str, Option]:
    """The file system's arguments: those of the configuration, and the credentials it names.

    Raises:
        ConfigError: it names a block that this process was not given.
    """
    block = storage.credentials_block
    if block and block not in _given:
        raise ConfigError(
            f"storage.credentials_block = {block!r} is known to a Prefect server: set "
            "PREFECT_API_URL, or put the credentials into the environment (FSSPEC_S3_KEY, "
            "FSSPEC_S3_SECRET) and leave the setting out"
        )
    return {**storage.options, **_given.get(block, {})}
