"""What importing costs: the driver starts without torch, the help without Prefect and Ray."""

import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "datasets")
DRIVER = ("flows", "tasks", "rlcore/config", "rlcore/store", "rlcore/data", "rlcore/rollout")
SINGLE = ("rlcore.sample", "rlcore.errors", "rlcore.plugins")


def modules() -> list[str]:
    """Dotted names of all modules that the driver may import."""
    names = [name for name in SINGLE if ROOT.joinpath(*name.split(".")).with_suffix(".py").exists()]
    for folder in DRIVER:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            names.append(".".join(relative.parts).removesuffix(".__init__"))
    return [name for name in names if not name.endswith("__main__")]


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_driver_s_modules_import_no_torch() -> None:
    names = modules()
    assert "rlcore.config.tree" in names and "flows.train" in names
    loaded = python(
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    if heavy:\n"
        "        sys.exit(f'{name} imports {heavy}')\n"
        "print('done')"
    )
    assert loaded.splitlines()[-1] == "done"


def test_help_loads_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "sys.argv = ['sluice', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = ('torch', 'transformers', 'prefect', 'ray', 'pyarrow')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = python(code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "train" in out and "resume" in out
        assert out.splitlines()[-1] == "[]"
    assert min(seconds) < 1.0, f"sluice --help takes {min(seconds):.2f} s of CPU time"
