"""A model that looks things up: its generate function, its tool and its reward.

What a key stands for changes from day to day, and the prompt does not say which day it is. So no
answer can be learned by heart: who does not search is right once in six.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from rlcore.rollout.turns import Turns
from rlcore.sample import Sample

CORPUS = Path(__file__).with_name("corpus.jsonl")
KEYS, VALUES = "abcdef", "012345"


@cache
def passages() -> dict[str, list[str]]:
    """Day -> what was written on that day."""
    found: dict[str, list[str]] = {}
    for line in CORPUS.read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["day"], []).append(row["passage"])
    return found


def search(day: str, query: str) -> str:
    """The passage of a day that has most words in common with a query."""
    words = set(query)
    return max(passages()[day], key=lambda passage: len(words & set(passage)))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """A key is a query and gets a passage; a value is the answer."""
    talk = Turns(args, sample, sampling_params, max_turns=2, max_tool_tokens=3, timeout_s=2)
    while await talk.model(stop=[*KEYS, *VALUES]):
        if talk.said[-1:] not in KEYS or not talk.said:
            break
        await talk.tool(search, sample.metadata["day"], talk.said[-1], form=">{}")
    return sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """0.4 for having found the right passage, 0.6 for the right answer."""
    _, searched, rest = sample.response.rpartition(">")
    answer = rest[len("a=0") :] if searched else sample.response
    found = f">{sample.prompt[-1]}={sample.label}" in sample.response
    return 0.4 * found + 0.6 * (answer == sample.label)
