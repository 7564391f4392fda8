"""What a /generate body may hold, and that everything else is refused with its name."""

from typing import Any

import pytest

from rlcore.engine.embedded.protocol import Limits, parse_call
from rlcore.errors import EngineError

LIMITS = Limits(context_length=200, vocab_size=50)


def parse(body: Any) -> Any:
    return parse_call(body, LIMITS, lambda texts: [[5] * len(text) for text in texts])


@pytest.mark.parametrize(
    ("params", "part"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        (
            {"max_new_tokens": 2, "min_new_tokens": 3},
            "min_new_tokens must be in [0, max_new_tokens",
        ),
        ({"n": 0}, "n must be at least 1"),
        ({"stop": [""]}, "stop must be"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list"),
        ({"sampling_seed": 1.5}, "sampling_seed must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"nonsense": 1}, "Unexpected sampling parameter 'nonsense'"),
        ({"regex": "a+"}, "'regex' is not offered"),
        ("fast", "sampling_params must be an object"),
    ],
)
def test_a_bad_parameter_is_named(params: Any, part: str) -> None:
    with pytest.raises(EngineError) as caught:
        parse({"input_ids": [5], "sampling_params": params})
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ([], "must be a JSON object"),
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [[5], []]}, "input_ids cannot be empty."),
        ({"input_ids": 5}, "input_ids must be a list"),
        ({"input_ids": [5, "6"]}, "integers only"),
        ({"input_ids": [5, True]}, "integers only"),
        ({"input_ids": [50]}, "Token id 50 is outside the vocabulary of 50 tokens."),
        ({"input_ids": [5, -1]}, "Token id -1"),
        ({"input_ids": [5], "text": "a"}, "exclude each other"),
        ({"text": [1]}, "text must be a string"),
        ({"input_ids": [5], "stream": True}, "stream=true is not offered"),
        ({"input_ids": [5], "return_routed_experts": True}, "--enable-return-routed-experts"),
        ({"input_ids": [5] * 200}, "The input (200 tokens) is longer than"),
        (
            {"input_ids": [5] * 60, "sampling_params": {"max_new_tokens": 141}},
            "a total of 201 tokens",
        ),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "holds 1 sets for 2 prompts"),
        ({"input_ids": [[5], [6]], "rid": ["a"]}, "rid holds 1 values for 2 prompts"),
        ({"input_ids": [5], "rid": 7}, "rid must be of type str"),
        (
            {"input_ids": [5], "return_logprob": True, "logprob_start_len": 2},
            "logprob_start_len (2) is beyond the prompt",
        ),
    ],
)
def test_a_bad_body_is_refused(body: Any, part: str) -> None:
    with pytest.raises(EngineError) as caught:
        parse(body)
    assert part in str(caught.value)


def test_one_bad_prompt_refuses_the_whole_call() -> None:
    with pytest.raises(EngineError, match="Token id 99"):
        parse({"input_ids": [[5], [6, 99]]})


def test_lists_go_to_their_prompts_and_scalars_to_all() -> None:
    call = parse(
        {
            "input_ids": [[5], [6, 7]],
            "sampling_params": [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}],
            "rid": ["a", "b"],
            "return_logprob": [True, False],
            "logprob_start_len": 0,
        }
    )
    assert call.batched
    got = [(r.rid, r.max_new_tokens, r.return_logprob, r.logprob_start) for r in call.requests]
    assert got == [("a", 1, True, 0), ("b_0", 2, False, 2), ("b_1", 2, False, 2)]


def test_no_limit_means_up_to_the_context() -> None:
    call = parse({"input_ids": [5] * 30, "sampling_params": {"max_new_tokens": None}})
    assert call.requests[0].max_new_tokens == 170
    assert not call.batched
