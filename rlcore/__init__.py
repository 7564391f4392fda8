"""Sluice's library: everything an RL iteration does, without any knowledge of Prefect.

Invariant: no module under `rlcore` imports `prefect`, `flows` or `tasks`.
"""

__version__ = "0.1.0"
