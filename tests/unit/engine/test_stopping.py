"""When a request ends, what its finish reason says and what its text holds."""

from typing import Any

import pytest


def greedy(engine: Any, **params: Any) -> Any:
    return engine.generate(
        {
            "input_ids": [5, 6, 7],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
            | params,
        }
    )


@pytest.fixture(scope="module")
def plain(engine: Any) -> Any:
    """What is generated when nothing stops it."""
    return greedy(engine)


def test_length(plain: Any) -> None:
    assert plain["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert len(plain["output_ids"]) == 12


def first_of_its_kind(ids: list[int], at_least: int) -> int:
    """The first position from `at_least` on whose token has not come before."""
    return next(i for i in range(at_least, len(ids)) if ids[i] not in ids[:i])


def test_stop_token(engine: Any, plain: Any) -> None:
    """The stop token is among the ids; the text leaves it out unless told otherwise."""
    ids = plain["output_ids"]
    at = first_of_its_kind(ids, 2)
    decode = engine.service.tokenizer.decode
    for no_trim in (False, True):
        answer = greedy(engine, stop_token_ids=[ids[at]], ignore_eos=False, no_stop_trim=no_trim)
        assert answer["output_ids"] == ids[: at + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[at]}
        assert answer["text"] == decode(ids[: at + 1 if no_trim else at])


def test_length_comes_before_a_stop(engine: Any, plain: Any) -> None:
    """As in SGLang: a stop token in the last place allowed counts as length."""
    ids = plain["output_ids"]
    at = first_of_its_kind(ids, 2)
    answer = greedy(engine, stop_token_ids=[ids[at]], ignore_eos=False, max_new_tokens=at + 1)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": at + 1}


def test_ignore_eos_ignores_stop_ids(engine: Any, plain: Any) -> None:
    answer = greedy(engine, stop_token_ids=plain["output_ids"], ignore_eos=True)
    assert answer["output_ids"] == plain["output_ids"]


def test_stop_ids_beyond_the_vocabulary_never_match(engine: Any, plain: Any) -> None:
    answer = greedy(engine, stop_token_ids=[10**6], ignore_eos=False, min_new_tokens=2)
    assert answer["output_ids"] == plain["output_ids"]


def test_min_new_tokens_rules_out_stops_before(engine: Any, plain: Any) -> None:
    first = plain["output_ids"][0]
    answer = greedy(engine, stop_token_ids=[first], ignore_eos=False, min_new_tokens=4)
    assert first not in answer["output_ids"][:4]
    assert len(answer["output_ids"]) >= 4


def test_stop_string_across_tokens(engine: Any, plain: Any) -> None:
    """A string that begins in one token and ends in another; ids go up to where it was complete."""
    ids = plain["output_ids"]
    pieces = [engine.service.tokenizer.decode([token]) for token in ids]
    at = first_of_its_kind(ids, 2)
    stop = pieces[at - 1][-1] + pieces[at][:-1]
    text = "".join(pieces)
    for no_trim in (False, True):
        answer = greedy(engine, stop=[stop, "never"], no_stop_trim=no_trim)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["output_ids"] == ids[: at + 1]
        end = len("".join(pieces[: at + 1])) if no_trim else text.index(stop)
        assert answer["text"] == text[:end]


def test_penalties_end_repetition(engine: Any) -> None:
    free = greedy(engine, max_new_tokens=60)["output_ids"]
    held = greedy(engine, max_new_tokens=60, repetition_penalty=2.0, frequency_penalty=2.0)
    assert len(set(free)) < len(set(held["output_ids"]))
