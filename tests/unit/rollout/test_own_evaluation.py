"""An evaluation by a function of one's own: what it is given, what becomes of what it returns."""

from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import DataConfig, EvalDataset, RewardConfig, RolloutConfig
from rlcore.data import load_dataset
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import EngineError, PluginError
from rlcore.rollout.evaluate import EvalResult, EvalSet, evaluate
from rlcore.rollout.limits import Limits
from rlcore.rollout.own_evaluation import OwnEvaluation
from rlcore.rollout.pool import EnginePool
from rlcore.rollout.rewards import Scorer

FUNCTION = """
from types import SimpleNamespace
from rlcore.rollout.generate import apply_result
from rlcore.sample import Sample, Status

async def good(args, rollout_id, data_source, evaluation=False):
    assert evaluation and rollout_id == 7 and args.max_response_len == 8
    assert data_source.names == ["many"] and len(data_source) == 3
    groups = data_source.get_samples("many")
    done = [await data_source.generate("many", group) for group in groups]
    own = groups[0][0]
    again = Sample(prompt_id=own.prompt_id, prompt=own.prompt, tokens=own.tokens[:2], label="x")
    apply_result(again, await args.generate(again.tokens, {"max_new_tokens": 3}))
    mine = {"samples": [again], "rewards": [0.25], "truncated": [True]}
    return SimpleNamespace(data={"many": done, "mine": mine}, metrics={"eval/figure": 3})

def plain(args, rollout_id, data_source):
    sample = Sample(prompt="q", response="a", status=Status.COMPLETED, reward=1.0)
    return {"plain": [[sample, sample]]}
"""
REWARD = "def reward(args, sample):\n    return float(len(sample.response) > 0)\n"


@pytest.fixture
def tokenizer(model_folder: Path) -> Any:
    return load_tokenizer(str(model_folder), False)


@pytest.fixture
def scorer(tmp_path: Path) -> Any:
    (tmp_path / "reward.py").write_text(REWARD)
    made = Scorer(RewardConfig(custom_rm_path=f"{tmp_path}/reward.py:reward"))
    yield made
    made.close()


async def evaluated(
    tmp_path: Path, server: Any, tokenizer: Any, scorer: Any, name: str, text: str = FUNCTION
) -> EvalResult:
    (tmp_path / "mine.py").write_text(text)
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "{d}="}}\n' for d in range(3)))
    held_out = EvalDataset(
        name="many", path=str(data), n_samples_per_eval_prompt=2, temperature=1.0
    )
    sets = [EvalSet(held_out, load_dataset(DataConfig(path=str(data)), lambda: tokenizer))]
    pool = EnginePool([server.url], Limits(128, 64), retries=0, timeout_s=5)
    try:
        return await evaluate(
            sets,
            RolloutConfig(max_response_len=8),
            tokenizer,
            pool,
            scorer,
            run_seed=1,
            version=server.version,
            iteration=7,
            own=OwnEvaluation(f"{tmp_path}/mine.py:{name}"),
        )
    finally:
        await pool.close()


async def test_what_it_returns_is_scored_measured_and_numbered(
    tmp_path: Path, server: Any, tokenizer: Any, scorer: Any
) -> None:
    found = await evaluated(tmp_path, server, tokenizer, scorer, "good")
    assert found.names == ["many", "mine"]
    many, mine = found.samples
    assert [s.group_index for s in many] == [0, 0, 1, 1, 2, 2]
    assert [s.index for s in many] == list(range(6)) and all(s.reward == 1.0 for s in many)
    assert {p["temperature"] for _, body in server.seen for p in _params(body)} == {1.0, None}
    assert (mine[0].reward, mine[0].group_index) == (0.25, 0)
    metrics = found.metrics
    assert (metrics["eval/many"], metrics["eval/mine"], metrics["eval/figure"]) == (1.0, 0.25, 3.0)
    assert metrics["eval/many/pass@2"] == 1.0


def _params(body: dict[str, Any]) -> list[dict[str, Any]]:
    found = body.get("sampling_params", [])
    return [{"temperature": one.get("temperature")} for one in found]


async def test_a_plain_function_may_score_without_engines(
    tmp_path: Path, server: Any, tokenizer: Any, scorer: Any
) -> None:
    text = FUNCTION.replace("[[sample, sample]]", "[[sample, Sample(**vars(sample))]]")
    found = await evaluated(tmp_path, server, tokenizer, scorer, "plain", text)
    [samples] = found.samples
    assert found.metrics["eval/plain/pass@2"] == 1.0
    assert [s.prompt_id for s in samples] == ["plain-0", "plain-0"]


async def test_the_function_of_the_page_picks_one_of_each_group(
    tmp_path: Path, server: Any, tokenizer: Any, scorer: Any
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()
    text = page.partition("```python file=own_evaluation.py\n")[2].partition("```")[0]
    found = await evaluated(tmp_path, server, tokenizer, scorer, "shortest", text)
    assert [s.prompt for s in found.samples[0]] == ["0=", "1=", "2="]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return []", "must return samples by the name of their data set, not list"),
        ("return {}", "not an empty dict"),
        ("return {'a': []}", "'a' must be a list of samples"),
        ("return {'a': [3]}", "'a' holds other things than samples"),
        ("return {'a': {'samples': [done], 'rewards': []}}", "0 rewards for 1 samples"),
        ("return {'a/b': [done]}", "the name of a data set has letters"),
        ("done.status = Status.PENDING; return {'a': [done]}", "sample 0 has status pending"),
        ("return data_source.get_samples('b')", "has no 'b'; there are: many"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("return SimpleNamespace(data={'a': [done]}, metrics={'x': 'y'})", "'y', not a number"),
        ("return SimpleNamespace(data={'a': [done]}, metrics={'x': 1e999})", "'x' is inf"),
    ],
)
async def test_what_is_wrong_names_the_setting(
    tmp_path: Path, server: Any, tokenizer: Any, scorer: Any, body: str, said: str
) -> None:
    head = FUNCTION.partition("async def")[0]
    done = "done = Sample(prompt='q', response='a', status=Status.COMPLETED, reward=1.0)"
    text = f"{head}def f(args, rollout_id, data_source):\n    {done}\n    {body}\n"
    with pytest.raises(PluginError, match=f"(eval.eval_function_path = |eval.datasets).*{said}"):
        await evaluated(tmp_path, server, tokenizer, scorer, "f", text)


async def test_a_response_of_another_policy_is_refused(
    tmp_path: Path, server: Any, tokenizer: Any, scorer: Any
) -> None:
    head = FUNCTION.partition("async def")[0]
    made = "Sample(prompt='q', status=Status.COMPLETED, reward=1.0, weight_versions=['8'])"
    text = f"{head}def f(args, rollout_id, data_source):\n    return {{'a': [{made}]}}\n"
    with pytest.raises(EngineError, match="policy version '8'"):
        await evaluated(tmp_path, server, tokenizer, scorer, "f", text)
