"""The store's credentials out of a Prefect block, into this process and nowhere else."""

import json
from collections.abc import Mapping
from typing import Any

from rlcore.config.tree import StorageConfig
from rlcore.errors import ConfigError
from rlcore.store.credentials import give

OPTION_OF = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "minio_root_user": "key",
    "minio_root_password": "secret",
    "region_name": "region_name",
    "endpoint_url": "endpoint_url",
}
"""Fields of credential blocks -> arguments of s3fs."""


async def fetch_credentials(storage: StorageConfig) -> None:
    """Fetch the block that the configuration names, if it does.

    Args:
        storage: `credentials_block` is `NAME` of a Secret block whose value is an object of s3fs
            arguments ({"key": ..., "secret": ...}), or `TYPE/NAME` of any other block, such as
            `aws-credentials/NAME`.

    Raises:
        ConfigError: there is no server to ask, no such block, or nothing of use in it.
    """
    block = storage.credentials_block
    if not block:
        return
    from prefect.blocks.core import Block
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        return  # Opening the store says what is missing.
    slug = block if "/" in block else f"secret/{block}"
    what = f"storage.credentials_block = {block!r}"
    try:
        loaded = await Block.aload(slug)
    except Exception as error:
        # Prefect raises ValueError, RuntimeError, ImportError or what its client meets.
        raise ConfigError(
            f"{what}: Prefect has no block {slug} that loads here ({type(error).__name__}); make "
            "it, and install the package of its type"
        ) from None
    options = _options(_plain(loaded), what)
    give(block, options)


def _plain(block: Any) -> Any:
    """A block's value with secrets as text: a Secret's own, else its fields, one level in."""
    if hasattr(block, "get"):
        return block.get()
    fields = {name: getattr(block, name) for name in type(block).model_fields}
    for inner in list(fields.values()):
        if hasattr(type(inner), "model_fields"):
            fields |= {name: getattr(inner, name) for name in type(inner).model_fields}
    return {
        name: value.get_secret_value() if hasattr(value, "get_secret_value") else value
        for name, value in fields.items()
    }


def _options(value: Any, what: str) -> dict[str, str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    names = {*OPTION_OF.values(), "anon", "profile"}
    found = {}
    if isinstance(value, Mapping):
        for name, content in value.items():
            option = OPTION_OF.get(name, name)
            if option in names and isinstance(content, str) and content:
                found[option] = content
    if not found:
        raise ConfigError(
            f"{what} holds no credentials: a Secret block needs an object such as "
            '{"key": ..., "secret": ...}'
        )
    return found
