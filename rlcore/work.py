"""What a stage's body hands to whoever commits it."""

from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.store.manifest import FileRef


@dataclass(frozen=True)
class Work:
    """The result of a stage before it is committed.

    Attributes:
        attempt: name of this execution; part of the names of its files.
        files: the parts it wrote.
        metrics: figures by name.
        compute_seconds: time in which engines or trainers computed; the rest is orchestration.
        timings: seconds of its parts, by name.
        policy_version: of the engines while it ran.
        cursor: where the data stood before and stands after it.
        extra: more that later stages need, as JSON.
    """

    attempt: str
    files: list[FileRef] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    compute_seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    policy_version: int | None = None
    cursor: dict[str, int] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def with_metrics(self, metrics: dict[str, float], *, policy_version: int) -> "Work":
        """A copy with more metrics, and the policy version that they are of."""
        return replace(self, metrics={**self.metrics, **metrics}, policy_version=policy_version)
