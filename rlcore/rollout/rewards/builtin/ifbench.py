"""The type `ifbench`: does the response follow every instruction of its prompt, strictly?

The checks are those of IFBench (arXiv 2507.02833), which is a repository and no package: its
folder must be importable. Nothing is fetched here.
"""

import importlib
from functools import lru_cache
from typing import Any

from rlcore.errors import PluginError
from rlcore.rollout.rewards.protocol import NoRewardError
from rlcore.sample import Sample


def ifbench(args: Any, sample: Sample) -> float:
    """1 where all instructions are followed, else 0.

    The metadata holds `instruction_id_list` and `kwargs` (one object each), and may hold
    `prompt_text` and `record_id`.

    Raises:
        NoRewardError: the metadata does not say what the instructions are.
        PluginError: IFBench cannot be imported.
    """
    ids, more = (sample.metadata.get(key) for key in ("instruction_id_list", "kwargs"))
    if not ids or more is None or len(ids) != len(more):
        raise NoRewardError(
            "its metadata needs instruction_id_list and kwargs, lists of one length, for "
            "reward.rm_type = 'ifbench'"
        )
    library = load_ifbench()
    text = sample.metadata.get("prompt_text")
    prompt = str(sample.prompt if text is None else text)
    case = library.InputExample(
        key=sample.metadata.get("record_id", 0),
        instruction_id_list=list(ids),
        prompt=prompt,
        kwargs=[{k: v for k, v in (one or {}).items() if v is not None} for one in more],
    )
    done = library.test_instruction_following_strict(case, {prompt: sample.response})
    return float(bool(done.follow_all_instructions))


@lru_cache(maxsize=1)
def load_ifbench() -> Any:
    """IFBench's module `evaluation_lib`.

    Raises:
        PluginError: it, or something that it needs, cannot be imported.
    """
    try:
        return importlib.import_module("evaluation_lib")
    except ImportError as error:
        raise PluginError(
            f"it needs IFBench, which cannot be imported ({error}): clone "
            "https://github.com/allenai/IFBench, install its requirements.txt, and put its folder "
            "on PYTHONPATH"
        ) from None
