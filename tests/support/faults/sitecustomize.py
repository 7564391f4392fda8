"""Kills at named points of a run, put in from outside: production code knows nothing of it.

Python imports this at start where the folder is on PYTHONPATH. Without SLUICE_FAULT it does
nothing.
SLUICE_FAULT names a file with a point a line, each `{signal}:{target}:{stage}:{phase}:{iteration}`:

    signal     kill (SIGKILL) or stop (SIGSTOP: the process hangs)
    target     tree      this driver and all that descend from it, itself first: nobody tidies up
               flow      this driver alone
               engine-N, rank-N, rollout    the process of an engine's server, of a trainer rank
                         or of the rollout worker, below this process or the stack's Ray head
               server, worker    that process of the stack whose record SLUICE_FAULT_STACK names
               ray       the stack's Ray head and all that descend from it
               machine   the stack's worker and all that descend from it, the driver among them
    stage      a stage's name, or `iteration` for its record
    phase      before      looked up and not found; its body has not begun
               middle@S    S seconds after its body began
               parts       its body is done, the manifest is not put
               committed   the manifest is put, its reference not yet returned
    iteration  its number

Each point fires once: SLUICE_FAULT_DIR keeps a marker of those that did, so that the next driver of
the run passes. What happened and when is in its `events.jsonl`, one JSON object a line.

The driver takes itself out of its environment before it connects to Ray, so that its actors know
nothing of this.
"""

import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader

HERE = os.path.dirname(os.path.abspath(__file__))


def _chain():
    """Run the sitecustomize that this one hides."""
    rest = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        exec(spec.loader.get_code("sitecustomize"), {"__name__": "sitecustomize"})


def _arm(plan, folder):
    """Put the points in as soon as the modules that hold them are imported."""
    import functools
    import inspect
    import json
    import re
    import signal
    import subprocess
    import threading
    import time
    from importlib.abc import Loader, MetaPathFinder
    from pathlib import Path

    stack = os.environ.get("SLUICE_FAULT_STACK", "")
    points = [
        dict(zip(FIELDS, point.split(":"), strict=True)) for point in Path(plan).read_text().split()
    ]
    folder = Path(folder)

    def note(**event):
        line = json.dumps({"at": time.time(), "pid": os.getpid(), **event}) + "\n"
        with (folder / "events.jsonl").open("ab", buffering=0) as file:
            file.write(line.encode())

    def marker(point):
        return folder / ("-".join(point.values()).replace("/", "_") + ".hit")

    def find(stage, iteration, phase):
        """The point that is due here and has not fired."""
        for point in points:
            named = (point["stage"], int(point["iteration"]), point["phase"].split("@")[0])
            if named == (stage, iteration, phase) and not marker(point).exists():
                return point
        return None

    def below(pid):
        import psutil

        try:
            found = psutil.Process(pid)
            return [found, *found.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def words(process):
        import psutil

        try:
            return process.cmdline()[:12]
        except psutil.Error:
            return []

    def daemon(name):
        """Process id of one of the stack's processes."""
        return json.loads(Path(stack).read_text())["processes"][name]["pid"]

    def victims(target):
        """Processes to end, in order."""
        if target == "flow":
            return below(os.getpid())[:1]
        if target == "tree":
            return below(os.getpid())
        kind, _, number = target.partition("-")
        if kind in ("server", "worker"):
            return below(daemon(kind))[:1]
        if kind in ("ray", "machine"):
            return below(daemon("ray" if kind == "ray" else "worker"))
        roots = [os.getpid(), *([daemon("ray")] if stack else [])]
        found = {p.pid: p for root in roots for p in below(root)}
        mark = {
            "engine": "rlcore.engine.embedded",
            "rank": "ray::TrainerActor",
            "rollout": "ray::RolloutActor",
        }[kind]
        matching = [p for p in found.values() if any(mark in word for word in words(p))]
        # An engine keeps its port however often it is started again.
        port = re.compile(r"--port (\d+)")
        matching.sort(key=lambda p: (port.findall(" ".join(words(p))), p.create_time()))
        # One that is just being started again is not there: then another of its kind.
        return [*matching[int(number or 0) :], *matching][:1]

    class Shot:
        """A point that is due, with its victims found and a shell that waits for the word.

        A process cannot kill itself first and others then, so a child of it does it; prepared, so
        that no time passes between the word and the signal.
        """

        def __init__(self, point):
            self.point = point
            self.pids = [p.pid for p in victims(point["target"])]
            self.tree = [(p.pid, p.create_time()) for p in below(os.getpid())]
            number = signal.SIGKILL if point["signal"] == "kill" else signal.SIGSTOP
            command = f"read word && kill -{number.value} {' '.join(map(str, self.pids))}"
            self.shell = subprocess.Popen(
                ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
            )

        def fire(self, late=False):
            """Send the signal. Where it is for this process, this does not return."""
            marker(self.point).touch(exist_ok=False)
            text = ":".join(self.point.values())
            note(event="fired", point=text, late=late, victims=self.pids, tree=self.tree)
            self.shell.stdin.write(b"now\n")
            self.shell.stdin.flush()
            while os.getpid() in self.pids:
                time.sleep(1)
            self.shell.wait()

    def at(stage, iteration, phase):
        point = find(stage, iteration, phase)
        if point is not None:
            Shot(point).fire()

    def in_the_middle(stage, iteration):
        """A timer of the point in the middle of a stage; called, it ends the wait."""
        point = find(stage, iteration, "middle")
        if point is None:
            return lambda failed=False: None
        shot, over = Shot(point), threading.Event()
        seconds = float(point["phase"].partition("@")[2] or 0)

        def wait():
            if not over.wait(seconds):
                shot.fire()

        timer = threading.Thread(target=wait, daemon=True)
        timer.start()

        def end(failed=False):
            over.set()
            timer.join()
            if not failed and not marker(point).exists():
                shot.fire(late=True)
            shot.shell.stdin.close()

        return end

    def patch_stage(module):
        """`tasks.stage.look_or_work` gets a body with the points around it."""
        original = module.look_or_work
        signature = inspect.signature(original)

        @functools.wraps(original)
        async def look_or_work(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            name, i, body = (bound.arguments[key] for key in ("name", "i", "body"))
            worked = False

            async def with_points(*args, **kwargs):
                nonlocal worked
                worked = True
                note(event="begun", stage=name, iteration=i)
                at(name, i, "before")
                end = in_the_middle(name, i)
                try:
                    work = await body(*args, **kwargs)
                except BaseException:
                    end(failed=True)
                    raise
                end()
                at(name, i, "parts")
                return work

            bound.arguments["body"] = with_points
            ref = await original(*bound.args, **bound.kwargs)
            if worked:
                note(event="committed", stage=name, iteration=i)
                at(name, i, "committed")
            return ref

        module.look_or_work = look_or_work

    def patch_store(module):
        """`RunStore.commit_iteration` gets the points of the iteration's record."""
        original = module.RunStore.commit_iteration

        @functools.wraps(original)
        def commit_iteration(self, iteration, *args, **kwargs):
            at("iteration", iteration, "before")
            record = original(self, iteration, *args, **kwargs)
            at("iteration", iteration, "committed")
            return record

        module.RunStore.commit_iteration = commit_iteration

    def patch_session(module):
        """From its connection to Ray on, the driver's children inherit nothing of this."""
        original = module.connect

        @functools.wraps(original)
        def connect(*args, **kwargs):
            if os.environ.pop("SLUICE_FAULT", None) is not None:
                note(event="driver")
                path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
                os.environ["PYTHONPATH"] = os.pathsep.join(p for p in path if p != HERE)
            return original(*args, **kwargs)

        module.connect = connect

    patches = {
        "rlcore.cluster.ray_session": patch_session,
        "rlcore.store.run_store": patch_store,
        "tasks.stage": patch_stage,
    }

    class Patching(Loader):
        def __init__(self, loader, patch):
            self.loader, self.patch = loader, patch

        def create_module(self, spec):
            return self.loader.create_module(spec)

        def exec_module(self, module):
            self.loader.exec_module(module)
            self.patch(module)

    class Finder(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name not in patches:
                return None
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = Patching(spec.loader, patches[name])
            return spec

    sys.meta_path.insert(0, Finder())


FIELDS = ("signal", "target", "stage", "phase", "iteration")
_chain()
if os.environ.get("SLUICE_FAULT"):
    _arm(os.environ["SLUICE_FAULT"], os.environ["SLUICE_FAULT_DIR"])
