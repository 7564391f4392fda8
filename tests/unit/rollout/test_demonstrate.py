"""The stages of supervised fine-tuning in the rollout worker: rows, no engine, no scorer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan
from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from rlcore.data.prompts import Prompt
from rlcore.errors import DataError
from rlcore.rollout.demonstrate import demonstration
from rlcore.rollout.limits import Limits
from rlcore.sample import Status
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    rows = [{"prompt": f"{d}=", "answer": str(d) * (1 + d % 3)} for d in range(10)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=str(data), response_key="answer"),
        rollout=RolloutConfig(rollout_batch_size=6, n_samples_per_prompt=1),
        reward=RewardConfig(rm_type="none"),
        filter=FilterConfig(),
        eval=EvalConfig(),
        supervised=True,
    )


async def test_rows_become_samples_with_a_mask_and_no_engine(plan: RolloutPlan) -> None:
    actor = RolloutActor(plan)
    first = await actor.rollout(1, 0, "a", None, 0)
    scores = await actor.reward(1, 0, "a", first.files)
    chosen = await actor.filter(1, 0, "a", first.files, scores.files)
    second = await actor.rollout(1, 1, "b", first.cursor, 0)
    await actor.close()
    objects = Objects.open(plan.root)
    parts = [table_to_samples(read_parts(objects, r.files)) for r in (first, second)]
    for sample in parts[0]:
        digit = int(sample.prompt[0])
        said = str(digit) * (1 + digit % 3)
        # Pad, end and unknown come before the digits in the vocabulary.
        assert sample.tokens == [digit + 3, 13, *[digit + 3] * len(said), 1]
        assert sample.response_length == len(said) + 1 == sum(sample.loss_mask or [])
        assert sample.response == f"{said}<eos>"
        assert (sample.rollout_log_probs, sample.weight_versions) == (None, [])
    assert [s.index for s in parts[0]] == [s.group_index for s in parts[0]] == list(range(6))
    # An epoch has every row once; the next begins with its own order.
    ids = [s.prompt_id for part in parts for s in part]
    assert len(set(ids[:10])) == 10
    assert second.cursor == {"epoch": 0, "offset": 6, "next_epoch": 1, "next_offset": 2, "size": 10}
    rows = read_parts(objects, scores.files).to_pylist()
    assert [(r["reward"], r["error"]) for r in rows] == [(0.0, None)] * 6
    assert (scores.metrics, chosen.extra) == ({}, {"kept": 6})
    assert first.metrics["rollout/tokens"] == sum(len(s.tokens) for s in parts[0])


async def test_a_batch_made_again_is_the_same_to_the_bit(plan: RolloutPlan) -> None:
    shas = []
    for name in ("a", "b"):
        actor = RolloutActor(plan)
        shas.append((await actor.rollout(1, 3, name, None, 0)).files[0].sha256)
        await actor.close()
    assert shas[0] == shas[1]
    other = RolloutActor(replace(plan, seed=6))
    assert (await other.rollout(1, 3, "c", None, 0)).files[0].sha256 != shas[0]
    await other.close()


def test_what_is_longer_than_the_context_is_cut_and_says_so() -> None:
    row = Prompt("id", 3, "p", response="r")
    limits = Limits(vocab_size=50, context_length=4)
    cut = demonstration(row, [1, 2, 3, 4, 5], [0, 0, 1, 0, 1], limits)
    assert (cut.tokens, cut.loss_mask, cut.status) == ([1, 2, 3, 4], [1, 0], Status.TRUNCATED)
    # All that was to be learned is beyond: counted when the batch is trained on.
    none = demonstration(row, [1, 2, 3, 4, 5], [0, 0, 0, 0, 1], limits)
    assert (none.response_length, none.loss_mask) == (0, [])
    # Nothing predicts the first token.
    bare = demonstration(row, [1, 2], [1, 1], limits)
    assert (bare.response_length, bare.status) == (1, Status.COMPLETED)
    with pytest.raises(DataError, match="row 3 has token id 50, outside"):
        demonstration(row, [1, 50], [0, 1], limits)
