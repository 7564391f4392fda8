"""Every line of the blocks in docs/rewards.md is so."""

import re
from pathlib import Path

import pytest

from rlcore.rollout.args import PluginArgs
from rlcore.rollout.rewards import builtin
from rlcore.rollout.rewards.builtin.answers import same
from rlcore.sample import Sample

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text(encoding="utf-8")


def lines(kind: str) -> list[list[str]]:
    """The lines of all blocks of a kind, cut where two spaces or more are."""
    bodies = re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [re.split(r" {2,}", line) for body in bodies for line in body.splitlines()]


@pytest.mark.parametrize(("answer", "label"), lines("equal"))
def test_equal(answer: str, label: str) -> None:
    assert same(answer, label)


@pytest.mark.parametrize(("answer", "label"), lines("different"))
def test_different(answer: str, label: str) -> None:
    assert not same(answer, label)


@pytest.mark.parametrize(("rm_type", "response", "label", "reward"), lines("scores"))
def test_scores(rm_type: str, response: str, label: str, reward: str) -> None:
    found = builtin.load(rm_type)(PluginArgs({}), Sample(response=response, label=label))
    number = found[builtin.find(rm_type).key] if isinstance(found, dict) else found
    assert number == pytest.approx(float(reward), abs=1e-3)


def test_the_page_lists_every_type() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == [
        "math", "deepscaler", "dapo", "math_verify", "f1", "gpqa", "ifbench", "random",
        "remote_rm", "judge",
    ]  # fmt: skip
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(builtin.BUILTINS)
    assert len(lines("equal")) > 50 and len(lines("different")) > 30
