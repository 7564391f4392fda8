"""Every error Sluice raises on purpose.

Each class is also the standard exception a caller would expect, takes one message, and pickles,
since errors cross Ray actors. A message is one sentence that names the file, key, row or setting at
fault and says what would fix it.

To add one: derive from `SluiceError` and the nearest standard exception, and say in the docstring
when it is raised and whether trying again can help.
"""


class SluiceError(Exception):
    """Root of all errors that Sluice raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[type["SluiceError"], tuple[str]]:
        return type(self), (self.message,)


class ConfigError(SluiceError, ValueError):
    """A setting is unknown, of a wrong type, out of range or contradicts another. Never retried."""


class DataError(SluiceError, ValueError):
    """A data file is missing, broken, or lacks what a setting names. Never retried."""


class PluginError(SluiceError, ValueError):
    """A custom function cannot be found, loaded, or has the wrong signature. Never retried."""


class RewardError(SluiceError, RuntimeError):
    """A scorer failed, hung or returned no number for more samples than the settings allow."""


class FilterError(SluiceError, RuntimeError):
    """The filter dropped so many groups that a batch could not be filled. Never retried."""


class StoreError(SluiceError, OSError):
    """The object store could not do what was asked."""


class StoreAway(StoreError):
    """The store did not answer for as long as it is waited for. Never retried."""


class Corrupt(StoreError):
    """An object's bytes do not match the digest that its manifest holds."""


class Conflict(StoreError):
    """Another writer committed something different under the same key. Never retried."""


class Fenced(StoreError):
    """Another driver holds the run's lease. Never retried."""


class NotFound(StoreError, LookupError):
    """The named run, iteration or object is not in the store."""


class EngineError(SluiceError, RuntimeError):
    """An inference engine did not start, died, or refused a request."""


class TrainError(SluiceError, RuntimeError):
    """A training step could not be done, or gave numbers that are not finite."""


class OutOfMemory(TrainError):
    """A batch did not fit into the trainer's memory; with smaller micro-batches it may."""


class SyncError(SluiceError, RuntimeError):
    """Engine and trainer do not hold the same weights after a sync."""


class ClusterError(SluiceError, RuntimeError):
    """Ray lacks the resources asked for, or an actor died."""


class ActorDied(ClusterError):
    """A Ray actor is gone: its process was killed, or its machine is away."""


NEVER_RETRIED = (
    ConfigError,
    DataError,
    PluginError,
    FilterError,
    StoreAway,
    Conflict,
    Fenced,
)
"""Errors for which trying the same thing again cannot help."""
