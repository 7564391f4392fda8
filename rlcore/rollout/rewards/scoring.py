"""The state of one batch that is being scored: calls that wait, scores that are in, failures
counted."""

from collections import Counter, deque
from dataclasses import replace

from rlcore.config.tree import RewardConfig
from rlcore.errors import RewardError
from rlcore.rollout.groups import split_groups
from rlcore.rollout.rewards import builtin
from rlcore.rollout.rewards.dispatch import function_name
from rlcore.rollout.rewards.process import Call
from rlcore.rollout.rewards.protocol import NoRewardError, Score
from rlcore.rollout.rewards.worker import to_score
from rlcore.sample import Sample, Status

CHUNKS_PER_WORKER = 4
LARGEST_CHUNK = 128
"""Calls that travel together: few enough that all workers end at about the same time."""
LOSSES_UNTIL_BLAMED = 2


class ScoringBatch:
    """Calls to make for a batch of samples, and what came of them.

    Args:
        config: the reward section.
        samples: of whole groups.
    """

    def __init__(self, config: RewardConfig, samples: list[Sample]) -> None:
        self._config = config
        self._samples = samples
        self._scores: list[Score | None] = [_known(s, config.reward_key) for s in samples]
        self._failed = [k for k, s in enumerate(self._scores) if s is not None and s.error]
        self._missing = sum(score is None for score in self._scores)
        self._places: dict[int, list[int]] = {}
        self._losses = Counter[int]()
        self.queue: deque[list[Call]] = deque()
        self._plan()

    @property
    def is_done(self) -> bool:
        """Whether every sample has its score."""
        return not self._missing

    def put(self, number: int, scores: list[Score]) -> None:
        """Note the scores of a call's samples."""
        for place, score in zip(self._places[number], scores, strict=True):
            self._scores[place] = score
            self._missing -= 1
            if score.error is not None:
                self._failed.append(place)

    def fail(self, call: Call, why: str) -> None:
        """Note that a call gave no scores."""
        self.put(call[0], [Score(error=why)] * len(call[1]))

    def again(self, calls: list[Call], how: str) -> None:
        """Queue calls whose worker was lost; one by one, so that a guilty one shows itself.

        A call that was all that two lost workers had is guilty, though neither had noted its begin.
        """
        if len(calls) == 1:
            [(number, _)] = calls
            self._losses[number] += 1
            if self._losses[number] >= LOSSES_UNTIL_BLAMED:
                self.fail(calls[0], how)
                return
        self.queue.extendleft([call] for call in reversed(calls))

    def check_failures(self) -> None:
        """Stop when more samples have failed than are allowed.

        Raises:
            RewardError: naming the function, how many failed, and the first.
        """
        failed, total = len(self._failed), len(self._samples)
        if failed <= self._config.max_failed * total:
            return
        first = self._failed[0]
        sample, score = self._samples[first], self._scores[first]
        assert score is not None
        waiting = f" ({self._missing} were not scored any more)" if self._missing else ""
        name = function_name(self._config.custom_rm_path, self._config.rm_type)
        raise RewardError(
            f"{name} gave no reward for {failed} of {total} samples{waiting}, more than "
            f"reward.max_failed = {self._config.max_failed:g} allows; the first is sample "
            f"{sample.index} (prompt {sample.prompt_id}): {score.error}"
        )

    def result(self) -> list[Score]:
        """A score for each sample, in order. Only when `is_done`."""
        return [score for score in self._scores if score is not None]

    def _plan(self) -> None:
        open_ = [k for k, score in enumerate(self._scores) if score is None]
        if self._config.batched:
            by_id = {id(self._samples[k]): k for k in open_}
            groups = split_groups([self._samples[k] for k in open_])
            self._places = {n: [by_id[id(s)] for s in g] for n, g in enumerate(groups)}
        else:
            self._places = {k: [k] for k in open_}
        rm_type = self._config.rm_type
        given = [_light(s) if rm_type else s for s in self._samples]
        calls = [(n, [given[k] for k in ks]) for n, ks in self._places.items()]
        # Calls that wait for a server run side by side, so each worker gets all of its own at once.
        remote = bool(rm_type) and builtin.find(rm_type).remote
        share = -(-len(calls) // (self._config.workers * (1 if remote else CHUNKS_PER_WORKER)))
        size = max(1, min(share, LARGEST_CHUNK))
        self.queue.extend(calls[k : k + size] for k in range(0, len(calls), size))


def _light(sample: Sample) -> Sample:
    """A sample without what no built-in type reads and takes long to send."""
    if sample.custom_rm_path:
        return sample
    return replace(
        sample,
        tokens=[],
        response_length=0,
        loss_mask=None,
        rollout_log_probs=None,
        teacher_log_probs=None,
        rollout_routed_experts=None,
        rollout_top_p_token_ids=None,
        rollout_top_p_token_offsets=None,
        multimodal_inputs=None,
        multimodal_train_inputs=None,
    )


def _known(sample: Sample, reward_key: str | None) -> Score | None:
    """The score of a sample that needs no call."""
    if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
        return Score(error=f"its generation ended as {sample.status}")
    if sample.reward is None:
        return None
    try:
        return to_score(sample.reward, reward_key)
    except NoRewardError as error:
        return Score(error=f"the reward that its generate function set is none: {error}")
