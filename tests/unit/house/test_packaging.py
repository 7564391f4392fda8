"""The pins lie in the ranges, the ranges admit both tested sets, and what is used is declared."""

import ast
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    name: [Requirement(r) for r in rs] for name, rs in PROJECT["optional-dependencies"].items()
}
REQUIRED = [Requirement(text) for text in PROJECT["dependencies"]]
BROUGHT_ALONG = {
    "PIL": "pillow",
    "aiohttp": "s3fs",
    "botocore": "s3fs",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "pydantic_core": "pydantic",
    "sgl_kernel": "sglang",
    "starlette": "fastapi",
    "tokenizers": "transformers",
    "yaml": "pyyaml",
}
"""Modules that come with a declared package and are named otherwise."""
GPU_SET = {
    "torch": "2.11.0+cu130",
    "transformers": "5.12.1",
    "sglang": "0.5.16",
    "megatron-core": "0.19.2",
    "prefect": "3.9.1",
    "ray": "2.60.0",
    "pyarrow": "25.0.0",
    "datasets": "5.2.0",
    "duckdb": "2.0.1",
    "fastapi": "0.150.0",
    "uvicorn": "0.54.0",
    "pydantic": "2.14.4",
    "cyclopts": "5.5.2",
    "orjson": "3.13.0",
    "s3fs": "2026.9.0",
}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_of_the_cpu_set_is_pinned_inside_its_range() -> None:
    pinned = pins()
    for requirement in [*REQUIRED, *EXTRAS["dev"], *EXTRAS["tracking"], *EXTRAS["megatron"]]:
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} does not admit {version}"


def test_everything_that_is_installed_with_sluice_is_pinned() -> None:
    pinned, seen = pins(), set[tuple[str, frozenset[str]]]()
    todo = [*REQUIRED, *EXTRAS["dev"], *EXTRAS["tracking"]]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        environments = [{"extra": extra} for extra in ("", *extras)]
        todo += [
            inner
            for inner in map(Requirement, distribution(name).requires or [])
            if inner.marker is None or any(inner.marker.evaluate(e) for e in environments)
        ]
    assert len(seen) > 150
    assert {name for name, _ in seen} - set(pinned) == set()


def test_pins_are_exact_plain_versions() -> None:
    assert len(pins()) > 150
    assert pins()["torch"] == "2.13.0"
    assert all("+" not in v and "/" not in v and " " not in v for v in pins().values())


def test_the_ranges_admit_the_gpu_set() -> None:
    requirements = {r.name: r for r in [*REQUIRED, *EXTRAS["gpu"], *EXTRAS["megatron"]]}
    for name, version in GPU_SET.items():
        assert requirements[name].specifier.contains(version), f"{requirements[name]}: no {version}"


def test_every_package_that_is_imported_is_declared() -> None:
    declared = [*REQUIRED, *(r for extra in EXTRAS.values() for r in extra)]
    modules = {r.name.replace("-", "_") for r in declared}
    modules |= {*BROUGHT_ALONG, "flows", "tasks", "rlcore", *sys.stdlib_module_names}
    used: dict[str, str] = {}
    for package in ("flows", "tasks", "rlcore"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                used |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    assert {name: where for name, where in used.items() if name not in modules} == {}
