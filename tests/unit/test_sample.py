"""The sample's invariants, and the errors' manners."""

import pickle

import pytest

import rlcore.errors as errors
from rlcore.errors import DataError, SluiceError
from rlcore.sample import Sample, Status


def prompt() -> Sample:
    """A sample of three prompt tokens without a response."""
    return Sample(index=7, prompt="7=", tokens=[1, 2, 3])


def test_a_response_grows_with_its_log_probs_and_mask() -> None:
    sample = prompt()
    sample.append_response_tokens([4, 5], [-0.5, -0.25], text="ab")
    sample.append_response_tokens([6], trainable=False, text="<tool>")
    sample.append_response_tokens([8], [-1.0], text="c")
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 8]
    assert sample.response_tokens == [4, 5, 6, 8]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, -1.0]
    assert (sample.prompt_length, sample.response_length) == (3, 4)
    assert sample.effective_response_length == 3
    assert sample.response == "ab<tool>c"


def test_tool_output_may_come_first() -> None:
    sample = prompt()
    sample.append_response_tokens([9], trainable=False)
    sample.append_response_tokens([4], [-0.5])
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0, 1], [0.0, -0.5])


def test_without_a_mask_every_response_token_is_trained_on() -> None:
    assert Sample(tokens=[1, 2, 3], response_length=2).effective_response_length == 2


@pytest.mark.parametrize(
    ("log_probs", "trainable", "words"),
    [
        (None, True, "2 trainable tokens need as many log-probs, got none"),
        ([-1.0], True, "2 trainable tokens need as many log-probs, got 1"),
        ([-1.0, -1.0], False, "not trained on take no log-probs"),
    ],
)
def test_log_probs_that_do_not_fit_are_refused_and_leave_the_sample_alone(
    log_probs: list[float] | None, trainable: bool, words: str
) -> None:
    sample = prompt()
    with pytest.raises(DataError, match=f"sample 7: .*{words}"):
        sample.append_response_tokens([4, 5], log_probs, trainable=trainable)
    assert sample == prompt()


def test_a_response_without_log_probs_cannot_be_continued_by_one_with() -> None:
    sample = Sample(index=7, tokens=[1, 2, 3], response_length=2)
    with pytest.raises(DataError, match="first 2 response tokens have no log-probs"):
        sample.append_response_tokens([4], [-1.0])


def test_appending_does_not_change_lists_that_others_hold() -> None:
    tokens = [1, 2, 3]
    sample = Sample(tokens=tokens)
    sample.append_response_tokens([4], [-1.0])
    assert tokens == [1, 2, 3]


@pytest.mark.parametrize("field", ["loss_mask", "rollout_log_probs", "teacher_log_probs"])
def test_a_field_of_the_wrong_length_is_named(field: str) -> None:
    sample = Sample(index=7, tokens=[1, 2, 3], response_length=2, **{field: [1]})  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"sample 7: {field} has 1 entries for 2 response tokens"):
        sample.validate()


def test_a_response_longer_than_its_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="response_length 4 exceeds its 3 tokens"):
        Sample(tokens=[1, 2, 3], response_length=4).validate()


def test_a_reward_is_a_number_or_one_key_of_a_dict() -> None:
    assert Sample().get_reward_value() is None
    assert Sample(reward=0.5).get_reward_value("ignored") == 0.5
    several = Sample(index=7, reward={"exact": 1, "length": 0.2})
    assert several.get_reward_value("exact") == 1.0
    for key in (None, "style"):
        with pytest.raises(DataError, match=r"\['exact', 'length'\].*reward\.reward_key"):
            several.get_reward_value(key)


def test_a_sample_survives_a_dict_and_unknown_keys_are_refused() -> None:
    sample = prompt()
    sample.append_response_tokens([4], [-0.5])
    sample.status, sample.reward, sample.metadata = Status.TRUNCATED, 0.5, {"a": [1]}
    data = sample.to_dict()
    assert data["status"] == "truncated"
    assert Sample.from_dict(data) == sample
    assert Sample.from_dict({}) == Sample()
    with pytest.raises(DataError, match="no field colour"):
        Sample.from_dict({"colour": "red"})


def test_every_error_pickles_and_is_also_a_standard_exception() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, SluiceError)]
    assert len(kinds) > 10
    for kind in kinds:
        back = pickle.loads(pickle.dumps(kind("rollout.top_p = 2 is not allowed")))
        assert type(back) is kind and str(back) == "rollout.top_p = 2 is not allowed"
        if kind is not SluiceError:
            assert issubclass(kind, ValueError | RuntimeError | OSError)
            assert kind.__doc__
