"""What `rlcore.algorithms` may import."""

import subprocess
import sys

import pytest


def loaded_after(module):
    code = f"import sys, {module}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["advantages", "plan", "flops", "aggregate"])
def test_what_the_driver_calls_needs_no_torch(module):
    assert not loaded_after(f"rlcore.algorithms.{module}") & {"torch", "ray", "transformers"}


def test_nothing_imports_ray_engines_or_models():
    modules = ("packing", "losses", "logprobs", "returns", "off_policy")
    names = ", ".join(f"rlcore.algorithms.{m}" for m in modules)
    forbidden = {"ray", "sglang", "megatron", "transformers", "prefect", "pydantic"}
    assert not loaded_after(names) & forbidden
