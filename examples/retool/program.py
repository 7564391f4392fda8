"""A model that writes programs: its generate function, its sandboxed tool and its reward.

The numbers that are asked about are seen by the program alone, as `x`.
"""

import asyncio
from typing import Any

from rlcore.rollout.sandbox import Ran, run_python
from rlcore.rollout.turns import Turns
from rlcore.sample import Sample

DIGITS = "0123456789"
END = "(x)"
_running: dict[str, asyncio.Task[Ran]] = {}


async def run(code: str) -> Ran:
    """Run a program. The same text is run once: it prints the same again."""
    if code not in _running:
        _running[code] = asyncio.create_task(run_python(code, timeout_s=5, memory_mb=256))
    return await asyncio.shield(_running[code])


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """What ends in `(x)` is a program and gets its output; a digit is the answer."""

    async def python(expression: str) -> str:
        ran = await run(f"x = {sample.metadata['x']}\nprint({expression})")
        output = ran.output.strip()
        if not ran.ok or output not in [*DIGITS]:
            output = "!"
        sample.metadata["program"] = {"code": expression, "output": output}
        return output

    talk = Turns(args, sample, sampling_params, max_turns=2, max_tool_tokens=2, timeout_s=10)
    while await talk.model(stop=[END, *DIGITS]):
        if not talk.said.endswith(END) or talk.room < 3:
            break
        await talk.tool(python, talk.said, form=":{}")
    return sample


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """0.2 for a program that prints a digit, 0.3 more for the right one, 0.5 for the right answer.

    An answer without a program is a guess, and gets nothing: with a reward for it, a model that is
    right once in five by chance learns to guess long before it writes its first program.
    """
    if (program := sample.metadata.get("program")) is None:
        return 0.0
    _, _, told = sample.response.partition(":")
    ran, printed = program["output"] in DIGITS, program["output"] == sample.label
    return 0.2 * ran + 0.3 * printed + 0.5 * (told[1:] == sample.label)
