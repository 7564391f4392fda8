"""Built-in types through the worker processes: per row, over HTTP, by a judge, in bounded time."""

import asyncio
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import JudgeConfig, RewardConfig
from rlcore.errors import PluginError, RewardError
from rlcore.rollout.rewards import Scorer, check_reward, try_reward
from rlcore.rollout.rewards.builtin.http import post
from rlcore.rollout.rewards.protocol import Score
from rlcore.sample import Sample, Status

from .conftest import RewardServer

needs_math_verify = pytest.mark.skipif(
    find_spec("math_verify") is None, reason="math-verify is not installed"
)


def samples(*responses: str, label: Any = "5", **more: Any) -> list[Sample]:
    return [
        Sample(
            group_index=k // 4,
            index=k,
            prompt_id=f"p{k // 4}",
            prompt=f"question {k}",
            tokens=[1, 2],
            response=text,
            response_length=1,
            label=label,
            seed=k,
            status=Status.COMPLETED,
            **more,
        )
        for k, text in enumerate(responses)
    ]


def run(batch: list[Sample], **settings: Any) -> list[Score]:
    scorer = Scorer(RewardConfig(**{"max_failed": 1.0, "timeout_s": 20.0} | settings))
    try:
        return scorer.score_now(batch)
    finally:
        scorer.close()


def test_a_type_scores_in_order() -> None:
    texts = [rf"\boxed{{{k}}}" for k in range(40)]
    for workers in (1, 2):
        found = run(samples(*texts, label=7), rm_type="math", workers=workers)
        assert [s.reward for s in found] == [float(k == 7) for k in range(40)]


def test_a_dict_gives_its_own_key_and_keeps_the_rest() -> None:
    config = RewardConfig(rm_type="dapo")
    assert config.reward_key == "score"
    [right, wrong] = run(samples("Answer: 5", "Answer: 6"), rm_type="dapo")
    assert (right.reward, wrong.reward) == (1.0, -1.0)
    assert json.loads(right.details or "") == {"score": 1.0, "acc": True, "pred": "5"}
    [other] = run(samples("Answer: 5"), rm_type="dapo", reward_key="acc")
    assert other.reward == 1.0


def test_a_sample_without_a_label_fails_alone() -> None:
    batch = samples(r"\boxed{5}", r"\boxed{5}")
    batch[1].label = None
    good, bad = run(batch, rm_type="math")
    assert good.reward == 1.0
    assert bad == Score(error="the sample has no label to compare with; set data.label_key")


def test_rows_may_name_their_own_type() -> None:
    batch = samples(r"\boxed{5}", "5", "Answer: 5", "5", r"\boxed{5}", "x")
    types = [None, "f1", "dapo", " f1 ", "boxed_f1", "deepscalar"]
    for sample, rm_type in zip(batch, types, strict=True):
        sample.metadata = {"rm_type": rm_type} if rm_type else {}
    found = run(batch, rm_type="math", reward_key="score")
    assert [s.reward for s in found] == [1.0, 1.0, 1.0, 1.0, 1.0, None]
    assert "rm_type of the sample = 'deepscalar': there is no" in str(found[5].error)
    assert "did you mean 'deepscaler'" in str(found[5].error)


def write(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return f"{folder / name}.py:reward"


def test_a_sample_may_name_its_own_function(tmp_path: Path) -> None:
    own = write(tmp_path, "own", "def reward(args, sample): return len(sample.tokens) + 40")
    slow = write(tmp_path, "slow", "async def reward(args, sample): return 7")
    ours = write(tmp_path, "ours", "def reward(args, sample): return 3")
    batch = samples("5", "5", "5", "5", "5")
    batch[1].custom_rm_path = own
    batch[2].custom_rm_path = slow
    batch[3].custom_rm_path = f"{tmp_path}/none.py:reward"
    batch[4].metadata = {"rm_type": "math"}
    found = run(batch, custom_rm_path=ours)
    assert [s.reward for s in found] == [3.0, 42.0, 7.0, None, 3.0]
    assert "custom_rm_path of the sample" in str(found[3].error)
    # Built-in types are given light samples, own functions whole ones.
    assert run(batch[:2], rm_type="f1")[1].reward == 42.0
    assert batch[0].tokens == [1, 2]


def test_a_group_may_name_its_own_function(tmp_path: Path) -> None:
    text = "def reward(args, samples): return [{} + k for k in range(len(samples))]"
    ours, own = (write(tmp_path, f"g{n}", text.format(n)) for n in (10, 20))
    batch = samples(*"x" * 12)
    for sample in batch[4:8]:
        sample.custom_rm_path = own
    batch[8].custom_rm_path = own
    found = run(batch, custom_rm_path=ours, batched=True)
    assert [s.reward for s in found[:8]] == [10, 11, 12, 13, 20, 21, 22, 23]
    assert "samples of one group name different reward functions" in str(found[8].error)


def test_what_a_type_needs_is_told_at_once() -> None:
    config = RewardConfig(rm_type="ifbench")
    with pytest.raises(PluginError, match=r"reward\.rm_type = 'ifbench': .*PYTHONPATH"):
        check_reward(config)
    with pytest.raises(PluginError, match="PYTHONPATH"):
        run(samples("x"), rm_type="ifbench")
    check_reward(RewardConfig(rm_type="boxed_math"))


def test_the_trial_says_what_is_missing() -> None:
    with pytest.raises(RewardError, match="no label to compare with"):
        try_reward(RewardConfig(rm_type="math"), samples("", label=None)[0])
    assert try_reward(RewardConfig(rm_type="math"), samples("")[0]).reward == 0.0


# --- reward models over HTTP ----------------------------------------------------------------------


def test_a_reward_model_is_asked(server: RewardServer) -> None:
    server.answer = lambda body: (200, len(body["response"]))
    batch = samples("", "a", "bb", metadata={"source": "s"})
    found = run(batch, rm_type="remote_rm", rm_url=f"{server.url}/score")
    assert [s.reward for s in found] == [0.0, 1.0, 2.0]
    assert server.paths == ["/score"] * 3
    assert sorted(server.seen, key=lambda b: b["prompt"])[1] == {
        "prompt": "question 1",
        "response": "a",
        "label": "5",
        "metadata": {"source": "s"},
    }


def test_a_reward_model_may_answer_an_object(server: RewardServer) -> None:
    server.answer = lambda body: (200, {"r": 0.5, "why": "so"})
    [score] = run(samples("x"), rm_type="remote_rm", rm_url=server.url, reward_key="r")
    assert (score.reward, json.loads(score.details or "")) == (0.5, {"r": 0.5, "why": "so"})


def test_the_prefix_sends_what_is_boxed(server: RewardServer) -> None:
    server.answer = lambda body: (200, float(body["response"] or -1))
    found = run(samples(r"\boxed{4}", "5"), rm_type="boxed_remote_rm", rm_url=server.url)
    assert [s.reward for s in found] == [4.0, -1.0]


def test_requests_go_side_by_side_up_to_the_limit(server: RewardServer) -> None:
    server.answer = server.slowly(0.3, lambda body: (200, 1))
    batch = samples(*"x" * 96)
    found = run(batch, rm_type="remote_rm", rm_url=server.url, concurrency=24)
    assert [s.reward for s in found] == [1.0] * 96
    assert 8 < server.most_open <= 24


def test_waiting_for_a_turn_takes_none_of_the_call_s_time(server: RewardServer) -> None:
    server.answer = server.slowly(0.4, lambda body: (200, 1))
    found = run(
        samples(*"x" * 8), rm_type="remote_rm", rm_url=server.url, concurrency=1, timeout_s=2.0
    )
    assert [s.reward for s in found] == [1.0] * 8


@pytest.mark.parametrize("status", [500, 503, 429, 0])
def test_what_may_pass_is_tried_again(server: RewardServer, status: int) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return (status, {"error": "busy"}) if len(server.seen) < 2 else (200, 3)

    server.answer = answer
    [score] = run(samples("x"), rm_type="remote_rm", rm_url=server.url, retries=2)
    assert (score.reward, len(server.seen)) == (3.0, 2)


@pytest.mark.parametrize(
    ("answer", "said", "tries"),
    [
        ((400, {"error": "no such model"}), "answered 400", 1),
        ((404, b"nothing here"), "nothing here", 1),
        ((500, {"error": "broken"}), "answered 500: {\"error\": \"broken\"} (2 tries)", 2),
        ((200, b"no json"), "what is no JSON: no json", 1),
        ((200, None), "returned None, not a number", 1),
        ((200, "1.0"), "not a number", 1),
        ((200, {"score": 1}), "set reward.reward_key", 1),
        ((200, b"NaN"), "not a finite number", 1),
        ((200, [1.0]), "not a number", 1),
    ],
)  # fmt: skip
def test_what_is_no_reward_is_a_failed_sample(
    server: RewardServer, answer: tuple[int, Any], said: str, tries: int
) -> None:
    server.answer = lambda body: answer
    [score] = run(samples("x"), rm_type="remote_rm", rm_url=server.url, retries=1)
    assert score.reward is None and said in str(score.error)
    assert len(server.seen) == tries


def test_a_server_that_is_not_there_or_hangs_is_a_failed_sample(server: RewardServer) -> None:
    [score] = run(samples("x"), rm_type="remote_rm", rm_url="http://127.0.0.1:9", retries=0)
    assert score.reward is None and "gave no answer: ConnectError" in str(score.error)
    began = time.monotonic()
    [score] = run(samples("x"), rm_type="remote_rm", rm_url="http://127.0.0.1:9", timeout_s=4.0)
    assert "gave no answer: ConnectError" in str(score.error), "what the tries met is said"
    assert time.monotonic() - began < 20
    server.answer = server.slowly(30, lambda body: (200, 1))
    settings = {"rm_type": "remote_rm", "rm_url": server.url}
    [score] = run(samples("x"), timeout_s=1.0, **settings)
    assert "it took longer than reward.timeout_s = 1 s" in str(score.error)
    [score] = run(samples("x"), request_timeout_s=0.3, retries=1, **settings)
    assert "ReadTimeout (2 tries)" in str(score.error)


async def test_a_call_that_runs_out_of_time_tells_what_its_requests_met() -> None:
    with pytest.raises(TimeoutError) as cut:
        async with asyncio.timeout(3):
            await post("http://127.0.0.1:9", {}, retries=99, timeout_s=1, within_s=999)
    assert "http://127.0.0.1:9 gave no answer: ConnectError" in str(cut.value.__cause__)


# --- a judge --------------------------------------------------------------------------------------

KEY = "sk-of-the-judge"


def says(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def judged(server: RewardServer, batch: list[Sample], **settings: Any) -> list[Score]:
    judge = JudgeConfig(url=f"{server.url}/v1/", model="j", **settings)
    return run(batch, rm_type="judge", judge=judge, retries=0)


def test_a_judge_scores(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_JUDGE_KEY", KEY)
    server.answer = lambda body: (200, says("It is half right.\n**Score:** 0.5"))
    [score] = judged(server, samples("{label} {prompt}"))
    assert score.reward == 0.5
    assert json.loads(score.details or "")["judge"].startswith("It is half right")
    assert server.paths == ["/v1/chat/completions"]
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    body = server.seen[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("j", 0.0, 1024)
    [message] = body["messages"]
    assert "<answer>\n{label} {prompt}\n</answer>" in message["content"]
    assert "<reference>\n5\n" in message["content"] and "question 0" in message["content"]
    assert KEY not in f"{score} {body}"


def test_a_judge_is_asked_as_the_settings_say(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLUICE_JUDGE_KEY", raising=False)
    server.answer = lambda body: (200, says("<think>grade 1</think> grade 3 and at last grade 8"))
    batch = samples("x", label=0)
    batch[0].prompt = [{"role": "user", "content": "why?"}]
    [score] = judged(
        server,
        batch,
        prompt="Q {prompt} R {label} A {response}",
        system="be strict",
        score_pattern=r"grade (\d+)",
        min_score=0.0,
        max_score=10.0,
    )
    assert score.reward == 8.0
    assert server.seen[0]["messages"] == [
        {"role": "system", "content": "be strict"},
        {"role": "user", "content": "Q user: why? R 0 A x"},
    ]
    assert "authorization" not in server.headers[0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, says("I cannot tell.")), "has no score that reward.judge.score_pattern finds"),
        ((200, says("Score: 7")), "the judge gave 7, which is not between"),
        ((200, says("Score: -1")), "the judge gave -1, which is not between"),
        ((200, says("")), "without a message"),
        ((200, says(None)), "without a message"),
        ((200, {"choices": []}), "without a message"),
        ((200, {"error": "x"}), "without a message"),
        ((200, b"<html>"), "no JSON"),
        ((401, {"error": "bad key"}), "answered 401"),
        ((500, {"error": "down"}), "answered 500"),
        ((0, None), "gave no answer"),
    ],
)
def test_a_judge_that_fails_gives_no_reward(
    server: RewardServer, answer: tuple[int, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_JUDGE_KEY", KEY)
    server.answer = lambda body: answer
    [score] = judged(server, samples("x"))
    assert score.reward is None and said in str(score.error)
    assert KEY not in str(score.error)


# --- bounds ---------------------------------------------------------------------------------------


@needs_math_verify
def test_a_hang_of_a_computer_algebra_system_is_ended_and_no_other_sample_pays() -> None:
    hangs = r"\boxed{" + "9^{" * 8 + "9" + "}" * 8 + "}"
    batch = samples(r"\boxed{5}", hangs, r"\boxed{6}")
    found = run(batch, rm_type="math_verify", timeout_s=4.0)
    assert [found[0].reward, found[2].reward] == [1.0, 0.0]
    assert found[1].error == "it took longer than reward.timeout_s = 4 s"


async def test_scoring_many_answers_lets_the_event_loop_run() -> None:
    texts = [rf"so \boxed{{\frac{{{k}}}{{7}}}}" for k in range(1000)]
    scorer = Scorer(RewardConfig(rm_type="math", workers=2, max_failed=1.0))
    try:
        await scorer.score(samples("x"))
        scoring = asyncio.ensure_future(scorer.score(samples(*texts, label=r"\frac{5}{7}")))
        late = []
        while not scoring.done():
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            late.append(time.perf_counter() - began - 0.005)
        found = await scoring
    finally:
        await asyncio.to_thread(scorer.close)
    assert sum(s.reward or 0 for s in found) == 1
    assert sorted(late)[int(0.9 * len(late))] < 0.1, f"the loop stood still for {max(late):.3f} s"
