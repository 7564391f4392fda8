"""Turns of a model and its tools: ids, masks, budgets, tools that fail, going on after a cut."""

import asyncio
import json
import string
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcore.config.tree import RolloutConfig
from rlcore.engine.launch import EngineProcess
from rlcore.errors import PluginError
from rlcore.rollout.generate import GenerateArgs, Generator
from rlcore.rollout.limits import Limits
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.turns import STATE, Turns, between
from rlcore.sample import Sample, Status

CHARACTERS = [*string.printable]
IDS = {character: k for k, character in enumerate(["<unk>", *CHARACTERS])}


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel(IDS, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def ids(text: str) -> list[int]:
    return [IDS.get(character, 0) for character in text]


class Model:
    """What the server's model says, turn by turn: (text, finish reason)."""

    def __init__(self, *turns: tuple[str, str], cut: EnginePool | None = None) -> None:
        self.turns = list(turns)
        self.cut = cut
        """The pool that ends all requests while one of them is answered."""
        self.asked: list[tuple[list[int], dict[str, Any]]] = []

    async def __call__(self, request: Request) -> Any:
        if request.url.path != "/generate":
            return {"weight_version": "0"}
        body = json.loads(await request.body())
        self.asked.append((body["input_ids"][0], body["sampling_params"][0]))
        text, reason = self.turns.pop(0)
        if self.cut is not None:
            self.cut.aborting = reason == "abort"
        tokens = ids(text)[: self.asked[-1][1]["max_new_tokens"]]
        return [
            {
                "text": text,
                "output_ids": tokens,
                "meta_info": {
                    "finish_reason": {"type": reason},
                    "output_token_logprobs": [[-0.25, t, None] for t in tokens],
                    "weight_version": "0",
                    "cached_tokens": 0,
                },
            }
        ]


def fresh(prompt: str = "Q") -> Sample:
    return Sample(group_index=0, index=0, prompt_id="p", prompt=prompt, tokens=ids(prompt), seed=7)


@pytest.fixture
async def pool(server: Any) -> AsyncIterator[EnginePool]:
    made = EnginePool([server.url], Limits(len(IDS), 4096), retries=0, timeout_s=5)
    yield made
    await made.close()


def begin(server: Any, pool: EnginePool, model: Model, **options: Any) -> Turns:
    server.answer = model
    sample = options.pop("sample", None) or fresh()
    config = RolloutConfig(max_response_len=options.pop("max_response_len", 1000), stop=["</end>"])
    args = GenerateArgs(config, tokenizer(), pool)
    params = {"temperature": 1.0, "max_new_tokens": 1, "sampling_seed": 7, "stop": ["</end>"]}
    return Turns(args, sample, params, **{"max_turns": 3} | options)


async def test_turns_and_answers_alternate_and_only_the_models_are_trained(
    server: Any, pool: EnginePool
) -> None:
    model = Model(("<s>x</s>", "stop"), ("<a>42</a>", "stop"))
    talk = begin(server, pool, model)
    assert await talk.model(stop=["</s>"])
    query = between(talk.said, "<s>", "</s>")
    assert query == "x"
    assert await talk.tool(str.upper, query, form="<r>{}</r>") == "<r>X</r>"
    assert await talk.model()
    sample = talk.sample
    sample.validate()
    assert sample.response == "<s>x</s><r>X</r><a>42</a>" and talk.said == "<a>42</a>"
    assert sample.tokens == ids("Q" + sample.response)
    assert sample.loss_mask == [1] * 8 + [0] * 8 + [1] * 9
    assert sample.rollout_log_probs == [-0.25] * 8 + [0.0] * 8 + [-0.25] * 9
    assert sample.status == Status.COMPLETED and sample.weight_versions == ["0", "0"]
    (_, first), (given, second) = model.asked
    assert (first["stop"], second["stop"]) == (["</end>", "</s>"], ["</end>"])
    assert given == ids("Q<s>x</s><r>X</r>")
    assert (first["max_new_tokens"], second["max_new_tokens"]) == (1000, 1000 - 16)
    assert sample.metadata[STATE] | {"begun": None} == {
        "turns": 2,
        "begun": None,
        "calls": 1,
        "errors": 0,
        "timeouts": 0,
    }


async def test_turns_run_out(server: Any, pool: EnginePool) -> None:
    talk = begin(server, pool, Model(("a", "stop"), ("b", "stop")), max_turns=2)
    assert await talk.model() and await talk.model()
    assert talk.sample.status == Status.COMPLETED
    assert not await talk.model()
    assert (talk.sample.status, talk.count, talk.said) == (Status.TRUNCATED, 2, "b")


async def test_a_turn_that_fills_the_budget_is_the_last(server: Any, pool: EnginePool) -> None:
    talk = begin(server, pool, Model(("abcd", "length")), max_response_len=4)
    assert not await talk.model()
    assert (talk.sample.status, talk.room) == (Status.TRUNCATED, 0)
    assert talk.tell("more") == "" and talk.sample.response == "abcd"
    assert not await talk.model()


@pytest.mark.parametrize(
    ("text", "room", "longest", "shown"),
    [
        ("abcdefgh", 100, 100, "[abcdefgh]"),
        ("abcdefgh", 11, 100, "[abcdefgh]"),
        ("abcdefgh", 10, 100, "[abc ...]"),
        ("abcdefgh", 100, 6, "[ab ...]"),
        ("abcdefgh", 6, 100, "[abc]"),
        ("abcdefgh", 3, 100, "[]"),
        ("abcdefgh", 2, 100, ""),
        ("x" * 2_000_000, 100, 10, "[xxxxxx ...]"),
        ("", 100, 100, "[]"),
    ],
)
async def test_an_answer_is_cut_so_that_a_word_of_the_model_fits(
    server: Any, pool: EnginePool, text: str, room: int, longest: int, shown: str
) -> None:
    talk = begin(server, pool, Model(), max_response_len=room, max_tool_tokens=longest)
    began = time.perf_counter()
    assert talk.tell(text, form="[{}]") == shown
    assert time.perf_counter() - began < 1
    assert talk.sample.response == shown and talk.sample.tokens == ids("Q" + shown)
    assert talk.room >= 1
    with pytest.raises(PluginError, match=r"no \{\} for the text"):
        talk.tell("x", form="[]")


async def test_a_tool_that_fails_says_so_to_the_model(server: Any, pool: EnginePool) -> None:
    talk = begin(server, pool, Model(), timeout_s=0.1)

    async def slow(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "late"

    began = time.perf_counter()
    assert await talk.tool(lambda: 1 / 0) == "error: ZeroDivisionError: division by zero"
    assert await talk.tool(slow, 30) == "error: no answer within 0.1 s"
    assert await talk.tool(slow, 0) == "late"
    assert time.perf_counter() - began < 5
    state = talk.sample.metadata[STATE]
    assert (state["calls"], state["errors"], state["timeouts"]) == (3, 1, 1)
    assert talk.sample.loss_mask == [0] * talk.sample.response_length
    assert talk.sample.non_generation_time >= 0.1


async def test_a_turn_that_was_cut_off_goes_on(server: Any, pool: EnginePool) -> None:
    model = Model(("one", "stop"), ("tw", "abort"), ("o!", "stop"), cut=pool)
    talk = begin(server, pool, model)
    assert await talk.model()
    talk.tell("?")
    assert not await talk.model()
    assert talk.sample.status == Status.ABORTED
    pool.aborting = False
    stored = Sample(**vars(talk.sample))
    again = begin(server, pool, model, sample=stored)
    assert await again.model()
    assert (again.said, again.count) == ("two!", 2)
    assert stored.response == "one?two!" and stored.loss_mask == [1, 1, 1, 0, 1, 1, 1, 1]


def test_between_takes_the_last_that_is_whole() -> None:
    assert between("<s>a</s> <s>b</s>", "<s>", "</s>") == "b"
    assert between("<s>a</s> <s>b", "<s>", "</s>") is None
    assert between("a</s>", "<s>", "</s>") is None
    assert between("<s></s>", "<s>", "</s>") == ""


PLUGIN = """
from rlcore.rollout.turns import Turns

async def generate(args, sample, sampling_params):
    talk = Turns(args, sample, sampling_params, max_turns=3)
    while await talk.model(stop=["="]) and talk.said.endswith("="):
        await talk.tool(len, talk.said, form="{}=")
    return talk.sample
"""


async def test_with_a_real_engine_it_repeats(
    engines: list[EngineProcess], real_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "talk.py").write_text(PLUGIN)
    config = RolloutConfig(
        max_response_len=24, custom_generate_function_path=f"{tmp_path}/talk.py:generate"
    )
    digits = PreTrainedTokenizerFast.from_pretrained(real_model)
    limits = Limits.of_model(real_model, None)
    async with asyncio.timeout(60):
        pool = EnginePool([engines[0].url], limits)
        runs = []
        for _ in range(2):
            samples = [
                Sample(group_index=0, index=k, prompt_id="p", tokens=[3 + k % 10, 13], seed=k)
                for k in range(16)
            ]
            runs.append(await Generator(config, digits, pool).run(samples, 16, None))
        await pool.close()
    first, again = runs
    assert [s.tokens for s in first] == [s.tokens for s in again]
    assert any(s.metadata[STATE]["calls"] for s in first)
    for sample in first:
        sample.validate()
        assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
