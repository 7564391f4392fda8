"""What is kept of trainer states and checkpoints, and the removal of the rest.

Invariant: a state or checkpoint is named removed, by a tombstone, before its first file goes. So a
reader that finds files missing can tell what was removed on purpose from what was lost.
"""

from collections.abc import Iterable
from itertools import islice

from rlcore.store.manifest import canonical_json, utc_now
from rlcore.store.objects import Objects
from rlcore.store.paths import pruned_key


def is_pruned(objects: Objects, prefix: str) -> bool:
    """Whether the folder was removed on purpose."""
    return objects.exists(pruned_key(prefix))


def prune(objects: Objects, newest_first: Iterable[str], keep_last: int) -> list[str]:
    """Remove all but the newest folders.

    Args:
        objects: the store.
        newest_first: folders from new to old; read only as far as the first that was removed
        before.
        keep_last: how many of the newest to keep.

    Returns:
        The folders that this call removed.
    """
    removed = []
    for prefix in islice(newest_first, keep_last, None):
        if is_pruned(objects, prefix):
            # Older ones were removed by the call that removed this one.
            break
        remove_folder(objects, prefix)
        removed.append(prefix)
    return removed


def remove_folder(objects: Objects, prefix: str) -> None:
    """Remove a state or checkpoint on purpose."""
    objects.put(pruned_key(prefix), canonical_json({"pruned": utc_now()}))
    for key in objects.list(prefix):
        if key != pruned_key(prefix):
            objects.delete(key)
