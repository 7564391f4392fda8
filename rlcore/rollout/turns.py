"""Turns of a model and its tools, for custom generate functions.

    async def generate(args, sample, sampling_params):
        talk = Turns(args, sample, sampling_params, max_turns=4)
        while await talk.model(stop=["</search>"]):
            if (query := between(talk.said, "<search>", "</search>")) is None:
                break
            await talk.tool(search, query, form="<result>{}</result>")
        return talk.sample

Invariants:
- What the model said stays as the engine gave it, ids and log-probs; no text is made ids again.
- What a tool said gets mask 0 and log-prob 0; ids that it is given are never the model's.
- Prompt, turns and what tools said fit the context and the response budget: a tool's answer is cut
  so that the model can still say something, and a sample without room is `truncated`.
- A tool that raises, or takes too long, answers with a sentence that says so, from which the model
  may learn. Both are counted in the sample's metadata.
- A sample that was cut off (`aborted`) goes on where it stood when it is given again.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlcore.errors import PluginError
from rlcore.rollout.generate import GenerateArgs, apply_result, sample_images
from rlcore.sample import Sample, Status

STATE = "turns"
"""Key in a sample's metadata: {turns, begun, calls, errors, timeouts}."""
CUT = " ..."
Tool = Callable[..., str | Awaitable[str]]


class Turns:
    """One sample's turns.

    Args:
        args: of the generate function.
        sample: of the generate function.
        sampling_params: of the generate function.
        max_turns: turns of the model.
        max_tool_tokens: longest answer of a tool; what is longer is cut.
        timeout_s: seconds that a tool may take.
    """

    def __init__(
        self,
        args: GenerateArgs,
        sample: Sample,
        sampling_params: dict[str, Any],
        *,
        max_turns: int,
        max_tool_tokens: int = 512,
        timeout_s: float = 10.0,
    ) -> None:
        if max_turns < 1 or max_tool_tokens < 1:
            raise PluginError(
                f"max_turns = {max_turns} and max_tool_tokens = {max_tool_tokens} must be 1 or more"
            )
        self.sample = sample
        self.said = ""
        """What the model said in its last turn."""
        self._args = args
        self._params = sampling_params
        self._max_turns = max_turns
        self._max_tool_tokens = max_tool_tokens
        self._timeout_s = timeout_s
        begin = {"turns": 0, "begun": None, "calls": 0, "errors": 0, "timeouts": 0}
        self._state: dict[str, Any] = sample.metadata.setdefault(STATE, begin)

    @property
    def count(self) -> int:
        """Turns that the model has had."""
        return int(self._state["turns"])

    @property
    def room(self) -> int:
        """Tokens that the response may still get."""
        left = self._args.max_response_len - self.sample.response_length
        return int(self._args.limits.response_budget(len(self.sample.tokens), left))

    async def model(self, stop: Sequence[str] = ()) -> bool:
        """One turn of the model.

        Args:
            stop: strings that end the turn, beside those of the settings; they stay in the text.

        Returns:
            Whether the model has finished its turn by itself. False: there is no turn or no room
            left, or it was cut off; the sample's status says which, and it is done.
        """
        sample, state = self.sample, self._state
        if state["begun"] is None:
            if self.count >= self._max_turns or self.room < 1:
                # Whoever asks for another turn has not seen an end.
                sample.status = Status.TRUNCATED
                return False
            state["begun"] = len(sample.response)
        elif self.room < 1:
            # It was cut off with its last token.
            sample.status, state["begun"] = Status.TRUNCATED, None
            state["turns"] += 1
            return False
        params = self._params | {"max_new_tokens": self.room}
        if stop:
            params["stop"] = [*params.get("stop", []), *stop]
        images = sample_images(sample)
        apply_result(sample, await self._args.generate(sample.tokens, params, images))
        self.said = sample.response[state["begun"] :]
        if sample.status == Status.ABORTED:
            return False
        state["begun"] = None
        state["turns"] += 1
        return sample.status == Status.COMPLETED

    async def tool(self, function: Tool, *given: Any, form: str = "{}") -> str:
        """Call a tool and append its answer.

        Args:
            function: plain functions run in a thread, which goes on after its time is up; what may
                hang for good belongs into a process (`rlcore.rollout.sandbox`).
            given: its arguments.
            form: text around the answer, with one `{}`.

        Returns:
            What was appended.
        """
        began = time.perf_counter()
        self._state["calls"] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(function):
                    answer = await function(*given)
                else:
                    answer = await asyncio.to_thread(function, *given)
        except TimeoutError:
            self._state["timeouts"] += 1
            answer = f"error: no answer within {self._timeout_s:g} s"
        except Exception as error:
            # A tool may raise anything, and the model may learn what it did wrong.
            self._state["errors"] += 1
            answer = f"error: {type(error).__name__}: {error}"
        self.sample.non_generation_time += time.perf_counter() - began
        return self.tell(str(answer), form=form)

    def tell(self, text: str, form: str = "{}") -> str:
        """Append text that the model did not write, cut so that it fits.

        Returns:
            What was appended; empty where there is no room for it and a word of the model.
        """
        head, mark, tail = form.partition("{}")
        if not mark:
            raise PluginError(f"form = {form!r} has no {{}} for the text")
        encode = self._args.tokenizer.encode
        frame = len(encode(head, add_special_tokens=False) + encode(tail, add_special_tokens=False))
        most = min(self._max_tool_tokens + frame, self.room - 1)
        space = most - frame
        if space < 0:
            return ""
        whole = head + self._cut(text, space) + tail
        ids = encode(whole, add_special_tokens=False)
        while len(ids) > most and text:
            # Texts side by side may take more ids than each alone, and so may half a character.
            text = text[: len(text) // 2]
            whole = head + self._cut(text, space) + tail
            ids = encode(whole, add_special_tokens=False)
        if not ids or len(ids) > most:
            return ""
        self.sample.append_response_tokens(ids, trainable=False, text=whole)
        return whole

    def _cut(self, text: str, space: int) -> str:
        """The beginning of a text, of at most `space` tokens."""
        tokenizer = self._args.tokenizer
        # No text of n tokens is needed beyond a few characters each: a megabyte is not encoded.
        short = text[: 16 * space + 16]
        ids = tokenizer.encode(short, add_special_tokens=False)
        if len(ids) <= space and len(short) == len(text):
            return text
        end = tokenizer.encode(CUT, add_special_tokens=False)
        kept = ids[: max(0, space - len(end))]
        return str(tokenizer.decode(kept)) + CUT if kept else str(tokenizer.decode(ids[:space]))


def between(text: str, begin: str, end: str) -> str | None:
    """What stands between the last `begin` and the `end` after it; None where it is not there."""
    _, found, rest = text.rpartition(begin)
    if not found:
        return None
    inner, found, _ = rest.partition(end)
    return inner if found else None
