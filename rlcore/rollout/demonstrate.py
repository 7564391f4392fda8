"""The rollout stage of supervised fine-tuning: the next rows of the data set, as samples to train.

No engine is asked. The rows follow the cursor in the order of the data plan, as the prompts of a
rollout do, so that a resumed run goes on with those that an undisturbed one would have used.
"""

from typing import Any

from rlcore.config.tree import DataConfig
from rlcore.data import Cursor, Dataset, Prompt, span
from rlcore.data.demonstrations import Demonstrations
from rlcore.errors import DataError
from rlcore.rollout.limits import Limits
from rlcore.rollout.loop import RolloutBatch
from rlcore.rollout.metrics import length_metrics
from rlcore.rollout.supply import RolloutRequest
from rlcore.sample import Sample, Status


def raw(config: DataConfig) -> DataConfig:
    """How the rows are read: as they are, with no generation prompt for whoever would answer."""
    return config.model_copy(update={"apply_chat_template": False})


def demonstrate(
    request: RolloutRequest,
    dataset: Dataset,
    tokenizer: Any,
    config: DataConfig,
    count: int,
    limits: Limits,
) -> RolloutBatch:
    """Make samples of the next `count` rows.

    Args:
        request: which rollout; its version and buffer do not matter.
        dataset: the rows, read as `raw` says.
        tokenizer: of the model.
        config: the data section.
        count: rows.
        limits: of the model.

    Raises:
        DataError: the data changed under the run, or a row cannot be used.
    """
    start = Cursor.after(request.cursor)
    picked, end = dataset.order(request.run_seed, request.shuffle).plan(start, count)
    rows = Demonstrations(tokenizer, config)
    samples = []
    for number, position in enumerate(picked):
        prompt = dataset.prompts[position]
        sample = demonstration(prompt, *rows.tokens(prompt), limits)
        sample.group_index = sample.index = number
        sample.response = tokenizer.decode(sample.response_tokens)
        samples.append(sample)
    metrics = length_metrics("rollout", samples)
    metrics["rollout/tokens"] = float(sum(len(sample.tokens) for sample in samples))
    metrics["rollout/epoch"] = start.epoch + start.offset / len(dataset)
    return RolloutBatch(samples, span(start, end), metrics, generation_s=0.0)


def demonstration(prompt: Prompt, tokens: list[int], mask: list[int], limits: Limits) -> Sample:
    """A row as a sample, whose response begins with the first trained token.

    One longer than the model's context is cut there and marked truncated.

    Raises:
        DataError: an id is outside the model's vocabulary.
    """
    if max(tokens) >= limits.vocab_size:
        raise DataError(
            f"row {prompt.row} has token id {max(tokens)}, outside the model's vocabulary of "
            f"{limits.vocab_size}; tokenizer and model do not belong together"
        )
    cut = limits.context_length
    whole, tokens, mask = len(tokens) <= cut, tokens[:cut], mask[:cut]
    # Nothing predicts the first token.
    first = max(1, mask.index(1) if 1 in mask else len(mask))
    sample = prompt.sample()
    sample.tokens = tokens
    sample.response_length = len(tokens) - first
    sample.loss_mask = mask[first:]
    sample.status = Status.COMPLETED if whole else Status.TRUNCATED
    sample.validate()
    return sample
