"""Connect to Ray, or start a private one, and call actors from asyncio with errors that mean
something.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from rlcore.errors import ActorDied, ClusterError, SluiceError
from rlcore.net import listens

T = TypeVar("T")
NAMESPACE = "sluice"
PRIVATE_OBJECT_STORE = 256 * 2**20
"""Bytes. Only small records pass through Ray's object store, so a private Ray needs little of
it.
"""
LOCAL = "local"
"""The address that stands for a private Ray."""
HEAD_PATIENCE_S = 5.0
"""Seconds that a head which is starting has until it listens."""
NEEDLESS = ("start_api_server", "start_log_monitor", "start_monitor")
STARTS = 3
"""How often a private Ray is begun before a machine counts as too slow for it."""


def where_ray_is(address: str) -> str:
    """The address that a setting means: `auto` is what the environment says, else `local`."""
    return os.environ.get("RAY_ADDRESS") or LOCAL if address == "auto" else address


def check_head(address: str) -> None:
    """Make sure that something listens where a Ray head should: Ray itself would try for minutes.

    Raises:
        ClusterError: nothing does.
    """
    address = where_ray_is(address)
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and not listens(host, int(port), HEAD_PATIENCE_S):
        raise ClusterError(
            f"cluster.ray_address = {address!r}: nothing listens there; start a head with "
            "`sluice up` or `ray start --head`, or use 'local'"
        )


def connect(address: str) -> bool:
    """Connect this process to Ray.

    Args:
        address: `local` for a private Ray that ends with this process, host:port of a head, or
            `auto` for $RAY_ADDRESS where it is set and else `local`.

    Returns:
        Whether this call made the connection, and so whether the caller has to end it.

    Raises:
        ClusterError: the head does not answer.
    """
    # Without these Ray asks a usage-statistics server and prints a banner at every start.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's workers would run at nice 15: behind Prefect's server wherever cores are few.
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = where_ray_is(address)
    check_head(address)
    if address == LOCAL:
        _keep_private()
    import ray

    if ray.is_initialized():
        return False
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": "ERROR",
        "job_config": _job_config(),
    }
    if address == LOCAL:
        options |= {
            "include_dashboard": False,
            "object_store_memory": PRIVATE_OBJECT_STORE,
            "num_cpus": os.cpu_count() or 1,
        }
    for attempt in range(STARTS):
        try:
            with own_signals(), bare_node() if address == LOCAL else contextlib.nullcontext():
                ray.init(address=address, **options)
            break
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"cluster.ray_address = {address!r}: no Ray head answers there ({error}); "
                "start one with `ray start --head` or use 'local'"
            ) from None
        except Exception as error:
            # Ray gives its own processes 30 seconds, which no setting changes, and raises a bare
            # Exception after it: a busy machine needs longer. What it began ends with this process.
            if type(error) not in (Exception, ray.exceptions.RaySystemError):
                raise
            if attempt + 1 == STARTS:
                raise ClusterError(
                    f"cluster.ray_address = {address!r}: a private Ray did not start within 30 s, "
                    f"{STARTS} times over ({error}); the machine is overloaded or short of memory"
                ) from None
    return True


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep this process's SIGTERM handler, which Ray would put its own in the place of: whoever
    set one has a run to end in good order.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before not in (None, signal.SIG_DFL) and in_main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def bare_node() -> Iterator[None]:
    """Start a Ray node without its dashboard, its autoscaler and the tailing of its logs.

    Nobody looks at those of a private Ray, and on two cores they would take two seconds of every
    start. Ray has no settings for it; the dashboard's agent is small where its libraries lack.
    """
    from ray._private.node import Node

    libraries = "ray.dashboard.optional_deps"
    kept = {name: getattr(Node, name) for name in NEEDLESS}
    known = sys.modules.get(libraries)
    for name in NEEDLESS:
        setattr(Node, name, lambda self, **_: None)
    sys.modules[libraries] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)
        sys.modules.pop(libraries)
        if known is not None:
            sys.modules[libraries] = known


def in_main_thread() -> bool:
    """Whether signal handlers may be set here."""
    return threading.current_thread() is threading.main_thread()


def _job_config() -> Any:
    """A job whose workers import nothing from the driver's working folder.

    Ray puts that folder before all others on their path, unless the job brings its own.
    """
    from ray.job_config import JobConfig

    class WithoutFolder(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return WithoutFolder()


def _keep_private() -> None:
    """Have a private Ray listen on loopback alone, and serve only who has the user's token.

    Ray replaces a loopback address by the machine's own, so that others can join, unless clusters
    are off; the switch is named after the systems where that is the default. Both settings are read
    when Ray is imported. Where it was before, `init` turns tokens on by itself.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if "ray" in sys.modules:
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False
    else:
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def disconnect() -> None:
    """End the connection to Ray, and a private Ray with it."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def own_address() -> str:
    """Where others of the cluster reach servers of this actor: loopback where it has one node."""
    import ray

    nodes = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return str(ray.util.get_node_ip_address()) if len(nodes) > 1 else "127.0.0.1"


def actor_class(kind: type) -> Any:
    """A class whose instances are Ray actors that are never restarted and whose calls are never
    repeated.

    Actors ask for no CPU: a run has a handful, most of them waiting, and a small machine must hold
    all.
    """
    import ray

    remote: Any = ray.remote
    return remote(num_cpus=0, max_restarts=0, max_task_retries=0)(kind)


async def call(ref: Awaitable[T], *, deadline_s: float, what: str) -> T:
    """Await an actor call.

    A plain `await` of the reference is what lets a cancelled flow leave at once; `ray.get` would
    not.

    Raises:
        SluiceError: the one that the actor raised, without Ray's wrapping.
        ActorDied: the actor is gone.
        ClusterError: it did not answer within `deadline_s` seconds.
    """
    import ray

    try:
        async with asyncio.timeout(deadline_s):
            return await ref
    except TimeoutError:
        raise ClusterError(f"{what} did not answer within {deadline_s:.0f} s") from None
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SluiceError):
            raise type(cause)(cause.message) from error
        raise
    except ray.exceptions.RayActorError as error:
        raise ActorDied(f"{what} died: {str(error).splitlines()[0]}") from None
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"{what} cannot be reached: Ray's head is gone, or is another one; start Ray, then "
            f"resume the run ({str(error).strip()})"
        ) from None


async def first_of(work: Awaitable[T], watch: "asyncio.Future[None] | None") -> T:
    """The result of `work`, unless `watch` fails before it: then that error.

    Either way nothing that was begun is left running unseen.
    """
    working = asyncio.ensure_future(work)
    try:
        if watch is not None:
            await asyncio.wait((working, watch), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                watch.result()
        return await working
    finally:
        if not working.done():
            working.cancel()


async def gather(*calls: Awaitable[T]) -> list[T]:
    """Wait for all, then raise the first error: a call is never left running unseen."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [r for r in results if not isinstance(r, BaseException)]
