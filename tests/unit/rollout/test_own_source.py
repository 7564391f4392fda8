"""A source of prompts of one's own: its state is in the manifest, so a rollout done again, or by
another worker, asks for the same; no prompt is lost or used twice.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan, StageReport
from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
)
from rlcore.errors import DataError, PluginError
from rlcore.plugins import load_checked
from rlcore.rollout.own_source import OwnSource
from rlcore.store.batch import read_parts, table_to_samples
from rlcore.store.objects import Objects

SOURCE = """
from rlcore.sample import Sample

class Backwards:
    '''The rows from the last to the first, again and again; every third prompt is made up.'''

    def __init__(self, args):
        self.args, self.given = args, 0

    def get_samples(self, num_samples):
        return [self._next() for _ in range(num_samples)]

    def _next(self):
        self.given += 1
        if self.given % 3 == 0:
            text = f"{self.given}="
            n = self.args.n_samples_per_prompt
            return [Sample(prompt=text, label=self.given, metadata={"made": k}) for k in range(n)]
        return self.args.group(-self.given % self.args.rows)

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]
"""
TWICE = """
from copy import deepcopy

from rlcore.rollout.generate import apply_result

async def generate(args, sample, sampling_params):
    made = [sample, deepcopy(sample)]
    made[1].tokens = [*sample.tokens, 5]
    for one in made:
        apply_result(one, await args.generate(one.tokens, sampling_params))
    return made
"""
N = 2


@pytest.fixture
def plan(tmp_path: Path, model_folder: Path) -> RolloutPlan:
    (tmp_path / "source.py").write_text(SOURCE)
    (tmp_path / "reward.py").write_text("def reward(args, sample):\n    return 1.0\n")
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{d}="}) + "\n" for d in range(100, 120)))
    return RolloutPlan(
        run_id="r",
        seed=5,
        root=str(tmp_path / "store"),
        options={},
        model_folder=str(model_folder),
        model=ModelConfig(path=str(model_folder)),
        data=DataConfig(path=str(data)),
        rollout=RolloutConfig(
            rollout_batch_size=4,
            n_samples_per_prompt=N,
            max_response_len=8,
            data_source_path=f"{tmp_path}/source.py:Backwards",
        ),
        reward=RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:reward"),
        filter=FilterConfig(),
        eval=EvalConfig(),
    )


def after(report: StageReport) -> dict[str, Any]:
    """The cursor that a driver hands to the next rollout."""
    beside = {name: report.extra.get(name) for name in ("buffer", "source")}
    return (report.cursor or {}) | beside


async def rolled(
    plan: RolloutPlan, servers: list[Any], i: int, cursor: dict[str, Any] | None
) -> StageReport:
    """One rollout by a worker that has made no other."""
    actor = RolloutActor(plan)
    await actor.set_engines([s.url for s in servers])
    try:
        return await actor.rollout(1, i, f"a{i}", cursor, 0)
    finally:
        await actor.close()


def prompts(plan: RolloutPlan, report: StageReport) -> list[str]:
    samples = table_to_samples(read_parts(Objects.open(plan.root), report.files))
    return [str(s.prompt) for s in samples[::N]]


async def test_each_rollout_goes_on_where_the_state_of_the_one_before_says(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    first = await rolled(plan, servers, 0, None)
    assert prompts(plan, first) == ["119=", "118=", "3=", "116="]
    assert first.extra["source"] == {"given": 4}
    assert (first.cursor or {})["next_offset"] == 4
    second = await rolled(plan, servers, 1, after(first))
    assert prompts(plan, second) == ["115=", "6=", "113=", "112="]
    again = await rolled(plan, servers, 1, after(first))
    assert [f.sha256 for f in again.files] == [f.sha256 for f in second.files]
    samples = table_to_samples(read_parts(Objects.open(plan.root), first.files))
    assert [s.metadata for s in samples[4:6]] == [{"made": 0}, {"made": 1}]
    assert len({s.prompt_id for s in samples}) == 4 and len({s.seed for s in samples}) == 8


@pytest.mark.parametrize("partial", [False, True])
async def test_what_is_left_over_comes_from_the_buffer_and_not_again_from_the_source(
    plan: RolloutPlan, servers: list[Any], partial: bool
) -> None:
    more = {"over_sampling_batch_size": 6, "partial_rollout": partial}
    plan = replace(plan, rollout=plan.rollout.model_copy(update=more))
    cursor, used = None, list[str]()
    for i in range(3):
        report = await rolled(plan, servers, i, cursor)
        cursor = after(report)
        used += prompts(plan, report)
    given = cursor["source"]["given"] if cursor else 0
    waiting = sum(file["rows"] for file in (cursor or {})["buffer"]["files"]) // N
    assert len(used) == len(set(used)) == 12 and given == 12 + waiting


async def test_a_prompt_whose_executions_made_several_samples_is_begun_anew_from_its_text(
    plan: RolloutPlan, servers: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "twice.py").write_text(TWICE)
    own = plan.rollout.model_copy(
        update={
            "custom_generate_function_path": f"{tmp_path}/twice.py:generate",
            "over_sampling_batch_size": 6,
            "partial_rollout": True,
            "max_staleness": 0,
        }
    )
    actor = RolloutActor(replace(plan, rollout=own))
    await actor.set_engines([s.url for s in servers])
    first = await actor.rollout(1, 0, "a0", None, 0)
    cursor = {
        **(first.cursor or {}),
        "buffer": first.extra["buffer"],
        "source": first.extra["source"],
    }
    for server in servers:
        server.version = "1"
    # What the first left is too old for the second.
    second = await actor.rollout(1, 1, "a1", cursor, 1)
    await actor.close()
    samples = table_to_samples(read_parts(Objects.open(plan.root), second.files))
    assert len(samples) == 4 * N * 2
    for k, sample in enumerate(samples):
        assert sample.weight_versions == ["1"]
        assert sample.prompt_length == len(sample.prompt) + k % 2


async def test_rollouts_in_the_order_of_the_data_cannot_go_on_with_a_source(
    plan: RolloutPlan, servers: list[Any]
) -> None:
    plain = replace(plan, rollout=plan.rollout.model_copy(update={"data_source_path": None}))
    first = await rolled(plain, servers, 0, None)
    assert "source" not in first.extra
    with pytest.raises(
        DataError, match=r"rollout\.data_source_path is set, but the rollouts so far"
    ):
        await rolled(plan, servers, 1, after(first))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("def state_dict", "def state", "has no method state_dict"),
        ("in range(num_samples)", "in range(1)", "gave 1 groups where 2 were asked for"),
        ('return {"given": self.given}', "return {1, 2}", "gave what JSON does not have"),
        ('return {"given": self.given}', "return 'x' * 2**21", "more than 1048576"),
        ("range(n)]", "range(1)]", "a group that is no list of rollout.n_samples_per_prompt = 2"),
        ("prompt=text", "prompt=str(k)", "a group of several prompts"),
        ("prompt=text", "prompt=''", "without tokens, and no text"),
        ("prompt=text", "prompt=text, status='completed'", "a sample that is not pending"),
        ("self.given += 1", "1 / 0", "raised ZeroDivisionError"),
    ],
)
def test_what_a_source_gets_wrong_names_the_setting(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in SOURCE
    (tmp_path / "source.py").write_text(SOURCE.replace(old, new).replace("% 3 == 0", "% 1 == 0"))
    encode = lambda text, add_special_tokens: [1] * len(text)  # noqa: E731
    tokenizer = SimpleNamespace(encode=encode)
    args: Any = SimpleNamespace(n_samples_per_prompt=2, rows=5, tokenizer=tokenizer)
    with pytest.raises(PluginError, match=rf"rollout\.data_source_path = .*{said}"):
        source = OwnSource(f"{tmp_path}/source.py:Backwards", args)
        source.take(2)
        source.state()


def test_a_class_takes_args_alone(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text("class A:\n    def __init__(self, args, more): ...\n")
    with pytest.raises(PluginError, match="it is called as"):
        load_checked(f"{tmp_path}/source.py:A", "rollout.data_source_path", "data_source")
