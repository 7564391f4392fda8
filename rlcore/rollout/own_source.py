"""A source of prompts of one's own, such as a curriculum, in place of the order of the data.

Invariants:
- What a source gives after a committed rollout depends on its state in that rollout's manifest
  alone: it is made anew for each rollout, so a rollout that is done again asks for the same.
- A prompt is handed out once; one that was begun and not used comes back from the buffer, not from
  the source.
"""

import hashlib
import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

from rlcore.config.tree import DataConfig, RolloutConfig
from rlcore.data import Dataset, Place
from rlcore.errors import DataError, PluginError, SluiceError
from rlcore.plugins import load_checked
from rlcore.rollout.args import PluginArgs
from rlcore.rollout.buffer import BEGUN_IN, Group
from rlcore.rollout.supply import Pick, RolloutRequest, Supply
from rlcore.rollout.turns import STATE
from rlcore.sample import Sample, Status

SETTING = "rollout.data_source_path"
ENDLESS = 2**31
"""Size of its one epoch in a cursor; which prompt stands where, the source alone knows."""
LARGEST_STATE = 2**20
"""Bytes of JSON."""
OF_A_RESPONSE = frozenset({BEGUN_IN, STATE, "reward_error"})
"""Keys in a sample's metadata that are about what was generated."""
Samples = list[Sample]


class SourceArgs(PluginArgs):
    """`args` of a source: the settings of `[data]` and `[rollout]`, and the data.

    Attributes:
        tokenizer: of the model.
        rows: prompts of `data.path`.
        run_seed: `run.seed`.
    """

    def __init__(
        self, config: RolloutConfig, data: DataConfig, dataset: Dataset, tokenizer: Any, seed: int
    ) -> None:
        own = {"tokenizer": tokenizer, "rows": len(dataset), "run_seed": seed}
        super().__init__(data.model_dump() | config.model_dump() | own)
        self.__dict__["_dataset"] = dataset

    def group(self, row: int) -> Samples:
        """The pending samples of a prompt of the data, counted from 0."""
        dataset: Dataset = self.__dict__["_dataset"]
        if not 0 <= row < len(dataset):
            raise PluginError(f"{SETTING}: there is no row {row}; the data has {len(dataset)}")
        prompt = dataset.tokenized([row], self.tokenizer)[0]
        return [prompt.sample() for _ in range(self.n_samples_per_prompt)]


class OwnSource:
    """The source of a run, at its state after the rollout before.

    Args:
        path: of the class, `rollout.data_source_path`.
        args: given to it.
        state: that it had; None: at the start.

    Raises:
        PluginError: it cannot be made, or lacks a method.
    """

    def __init__(self, path: str, args: SourceArgs, state: Any = None) -> None:
        self._what = f"{SETTING} = {path!r}"
        self._args = args
        made = load_checked(path, SETTING, "data_source")
        self._source = self._call(made, args)
        for name in ("get_samples", "state_dict", "load_state_dict"):
            if not callable(getattr(self._source, name, None)):
                raise PluginError(
                    f"{self._what} has no method {name}: a source gives groups by "
                    "get_samples(num_samples), and its state, as JSON has it, by state_dict() and "
                    "load_state_dict(state)"
                )
        if state is not None:
            self._call(self._source.load_state_dict, deepcopy(state))

    def take(self, n: int) -> list[Samples]:
        """The next `n` groups, each sample pending and with its prompt's tokens.

        Raises:
            PluginError: it gives something else.
        """
        if not n:
            return []
        groups = self._call(self._source.get_samples, n)
        if not isinstance(groups, list) or len(groups) != n:
            count = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
            raise PluginError(
                f"{self._what} gave {count} where {n} were asked for; a source that has come to "
                "its end begins again"
            )
        return [self._checked(group) for group in groups]

    def state(self) -> Any:
        """Its state, as JSON has it.

        Raises:
            PluginError: it is no such thing, or too large.
        """
        state = self._call(self._source.state_dict)
        try:
            text = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"{self._what}: state_dict() gave what JSON does not have: {error}"
            ) from None
        if len(text) > LARGEST_STATE:
            raise PluginError(
                f"{self._what}: its state has {len(text)} bytes, more than {LARGEST_STATE}"
            )
        return json.loads(text)

    def _checked(self, group: Any) -> Samples:
        size = self._args.n_samples_per_prompt
        whole = isinstance(group, list) and len(group) == size
        if not whole or not all(isinstance(one, Sample) for one in group):
            raise PluginError(
                f"{self._what} gave a group that is no list of rollout.n_samples_per_prompt = "
                f"{size} samples"
            )
        for sample in group:
            if sample.status != Status.PENDING or sample.response_length:
                raise PluginError(f"{self._what} gave a sample that is not pending")
            sample.rollout_id = None
            if not sample.tokens:
                if not isinstance(sample.prompt, str) or not sample.prompt:
                    raise PluginError(
                        f"{self._what} gave a sample without tokens, and no text to make them of"
                    )
                encode = self._args.tokenizer.encode
                sample.tokens = list(encode(sample.prompt, add_special_tokens=False))
            if not sample.prompt_id:
                text = json.dumps([sample.prompt, str(sample.label)], ensure_ascii=False)
                digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
                sample.prompt_id = digest.hexdigest()[:16]
        if len({sample.prompt_id for sample in group}) > 1:
            raise PluginError(f"{self._what} gave a group of several prompts")
        return list(group)

    def _call(self, function: Any, *given: Any) -> Any:
        try:
            return function(*given)
        except SluiceError:
            raise
        except Exception as error:
            # A class of one's own may raise anything; there are no prompts without it.
            raise PluginError(f"{self._what} raised {type(error).__name__}: {error}") from error


class OwnSupply(Supply):
    """Hands out the groups of a source of one's own, numbered and seeded."""

    def __init__(
        self,
        request: RolloutRequest,
        dataset: Dataset,
        tokenizer: Any,
        config: RolloutConfig,
        source: OwnSource,
        pick: Pick = lambda iteration, buffer, n: None,
    ) -> None:
        super().__init__(request, dataset, tokenizer, config, pick)
        if self._start.size not in (None, ENDLESS):
            raise DataError(
                f"{SETTING} is set, but the rollouts so far took the prompts of data.path in their "
                "order: start a new run"
            )
        self._source = source
        self._untouched: dict[Place, Samples] = {
            group.place: _begun_anew(group.samples, tokenizer) for group in request.buffer
        }

    def anew(self, place: Place) -> Samples:
        """Samples of the prompt that was handed out at a place, nothing generated."""
        fresh, n = self._untouched[place], self._config.n_samples_per_prompt
        if not fresh[0].tokens:
            raise DataError(
                f"all samples of prompt {fresh[0].prompt_id} were cut from several executions, and "
                "its messages cannot be made to ids again: it cannot be begun anew; have the "
                f"class of {SETTING} give texts"
            )
        return [deepcopy(one) for one in (fresh if len(fresh) == n else fresh[:1] * n)]

    @property
    def epoch(self) -> float:
        """A source has no epochs."""
        return 0.0

    def _begin(self, n: int) -> list[Group]:
        start = self._end.offset
        self._end = replace(self._end, offset=start + n, size=ENDLESS)
        groups = [Group((0, start + k), one) for k, one in enumerate(self._source.take(n))]
        self._untouched |= {group.place: deepcopy(group.samples) for group in groups}
        return groups


def _begun_anew(samples: Samples, tokenizer: Any) -> Samples:
    """Samples of the same prompt, nothing generated; at least one.

    What an execution of several has before its responses need not be the prompt's ids: where there
    is nothing else, the text gives them again, and messages give none.
    """
    alone = [_untouched(s, s.tokens[: s.prompt_length]) for s in samples if s.rollout_id is None]
    if alone:
        return alone
    text = samples[0].prompt
    ids = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else []
    return [_untouched(samples[0], ids)]


def _untouched(sample: Sample, prompt: list[int]) -> Sample:
    return Sample(
        prompt_id=sample.prompt_id,
        prompt=deepcopy(sample.prompt),
        label=deepcopy(sample.label),
        metadata={k: deepcopy(v) for k, v in sample.metadata.items() if k not in OF_A_RESPONSE},
        tokens=list(prompt),
        multimodal_inputs=deepcopy(sample.multimodal_inputs),
        generate_function_path=sample.generate_function_path,
        custom_rm_path=sample.custom_rm_path,
    )
