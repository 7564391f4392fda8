"""Turns under any script of a model and its tools: ids, masks, log-probs and budgets."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.rollout.client import GenerateResult
from rlcore.rollout.limits import Limits
from rlcore.rollout.turns import Turns
from rlcore.sample import Sample, Status

SHIFT = 100
"""Ids of text begin here; those of the model are below."""


class Bytes:
    """A tokenizer that cuts characters apart: half of one is decoded to another text."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [SHIFT + byte for byte in text.encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(one - SHIFT for one in ids).decode(errors="replace")


@dataclass
class Args:
    """What `Turns` uses of a generate function's `args`; the model says what it is told to."""

    limits: Limits
    max_response_len: int
    tokenizer: Bytes = field(default_factory=Bytes)
    next: GenerateResult | None = None
    asked: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)

    async def generate(
        self, ids: list[int], params: dict[str, Any], images: Any = None
    ) -> GenerateResult:
        assert self.next is not None
        self.asked.append((list(ids), params))
        room = params["max_new_tokens"]
        said = self.next.tokens[:room]
        reason = "length" if len(self.next.tokens) > room else self.next.finish_reason
        return GenerateResult(said, [-0.5] * len(said), reason, "m" * len(said), "3")


MODEL = st.tuples(
    st.just("model"),
    st.lists(st.integers(1, 50), max_size=12),
    st.sampled_from(["stop", "stop", "stop", "length", "abort"]),
)
TELL = st.tuples(
    st.just("tell"),
    st.text("ab<é→", max_size=14),
    st.sampled_from(["{}", "<r>{}</r>", "é{}→", "{} " + "x" * 9]),
)
SIZES = st.fixed_dictionaries(
    {
        "context": st.integers(6, 60),
        "response": st.integers(1, 50),
        "tool": st.integers(1, 12),
        "turns": st.integers(1, 4),
        "prompt": st.integers(1, 5),
    }
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(SIZES, st.lists(MODEL | TELL, max_size=10))
def test_ids_and_masks_are_whose_words_they_are_and_budgets_hold(
    sizes: dict[str, int], script: list[tuple[str, Any, str]]
) -> None:
    args = Args(Limits(SHIFT + 256, sizes["context"]), sizes["response"])
    prompt = list(range(1, sizes["prompt"] + 1))
    sample = Sample(index=0, prompt_id="p", prompt="q", tokens=list(prompt))
    talk = Turns(
        args,  # type: ignore[arg-type]
        sample,
        {"temperature": 1.0},
        max_turns=sizes["turns"],
        max_tool_tokens=sizes["tool"],
    )
    ours: list[tuple[int, int, float]] = []
    for kind, what, how in script:
        if kind == "model":
            args.next = GenerateResult(what, [], how)
            before = len(args.asked)
            went_on = asyncio.run(talk.model())
            if len(args.asked) > before:
                given_ids, params = args.asked[-1]
                assert given_ids == prompt + [one for one, _, _ in ours]
                room = params["max_new_tokens"]
                assert 1 <= room <= sizes["response"] - len(ours)
                ours += [(one, 1, -0.5) for one in what[:room]]
            else:
                assert not went_on and sample.status == Status.TRUNCATED
            assert went_on == (sample.status == Status.COMPLETED and len(args.asked) > before)
            assert talk.count <= sizes["turns"]
        else:
            said = talk.tell(what, form=how)
            told = args.tokenizer.encode(said)
            ours += [(one, 0, 0.0) for one in told]
            head, _, tail = how.partition("{}")
            frame = len(args.tokenizer.encode(head + tail))
            assert len(told) <= sizes["tool"] + frame
            assert not told or talk.room >= 1, "the model can say something after a tool"
            assert not told or (said.startswith(head) and said.endswith(tail))
        check(sample, prompt, ours)
        assert len(sample.tokens) <= max(sizes["context"], len(prompt))
        assert sample.response_length <= sizes["response"]


def check(sample: Sample, prompt: list[int], ours: list[tuple[int, int, float]]) -> None:
    sample.validate()
    assert sample.tokens == prompt + [one for one, _, _ in ours]
    assert sample.response_length == len(ours)
    mask = [1] * len(ours) if sample.loss_mask is None else sample.loss_mask
    assert mask == [own for _, own, _ in ours]
    assert (sample.rollout_log_probs or []) == [log_prob for _, _, log_prob in ours]
