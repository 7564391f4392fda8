"""Scoring in worker processes: only the guilty sample suffers, and every failure is told."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.tree import RewardConfig
from rlcore.errors import PluginError, RewardError
from rlcore.rollout.rewards import Scorer, check_reward, try_reward
from rlcore.rollout.rewards.protocol import Score
from rlcore.sample import Sample, Status

N, GROUP = 40, 4


def samples(n: int = N) -> list[Sample]:
    return [
        Sample(
            group_index=k // GROUP,
            index=k,
            prompt_id=f"p{k // GROUP}",
            tokens=[1, 2, 3],
            response="x" * k,
            response_length=2,
            status=Status.COMPLETED,
        )
        for k in range(n)
    ]


class Scoring:
    """A reward file in a folder of its own, and a log of the calls it saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls.log"

    def config(self, body: str, **settings: Any) -> RewardConfig:
        text = (
            "import asyncio, ctypes, math, os, re, sys, time\n"
            f"LOG = os.open({str(self.log)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
            "def log(sample): os.write(LOG, f'{sample.index}\\n'.encode())\n"
        )
        file = self.folder / "mine.py"
        file.write_text(text + body)
        settings = {"timeout_s": 20.0, "max_failed": 1.0} | settings
        return RewardConfig(custom_rm_path=f"{file}:reward", **settings)

    def calls(self) -> Counter[int]:
        return Counter(int(line) for line in self.log.read_text().split())

    @contextmanager
    def scorer(self, body: str, **settings: Any) -> Iterator[Scorer]:
        scorer = Scorer(self.config(body, **settings))
        try:
            yield scorer
        finally:
            scorer.close()

    def score(self, body: str, n: int = N, **settings: Any) -> list[Score]:
        with self.scorer(body, **settings) as scorer:
            return scorer.score_now(samples(n))


@pytest.fixture
def scoring(tmp_path: Path) -> Scoring:
    return Scoring(tmp_path)


def only_failed(scores: list[Score]) -> dict[int, str]:
    """Errors by sample; all others must have their own right reward."""
    assert all(s.reward == k for k, s in enumerate(scores) if s.error is None)
    assert all(s.reward is None for s in scores if s.error is not None)
    return {k: s.error for k, s in enumerate(scores) if s.error is not None}


LENGTH = "def reward(args, sample, **kw):\n    log(sample)\n"


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_come_in_order_and_each_sample_is_scored_once(
    scoring: Scoring, workers: int
) -> None:
    scores = scoring.score(LENGTH + "    return len(sample.response)\n", n=300, workers=workers)
    assert [s.reward for s in scores] == list(range(300))
    assert scoring.calls() == Counter(range(300))


def test_a_scorer_serves_many_batches_with_the_same_processes(scoring: Scoring) -> None:
    with scoring.scorer("def reward(args, sample): return os.getpid()", workers=2) as scorer:
        pids = {s.reward for _ in range(3) for s in scorer.score_now(samples())}
    assert 1 <= len(pids) <= 2
    time.sleep(0.05)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid or 0), 0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("1 / 0", "it raised ZeroDivisionError: division by zero"),
        ("None", "it returned None, not a number"),
        ("'1.0'", "it returned '1.0', not a number"),
        ("float('nan')", "it returned nan, not a finite number"),
        ("math.inf", "it returned inf, not a finite number"),
        ("{'a': 1}", "set reward.reward_key"),
        ("[1.0]", "it returned [1.0], not a number"),
        ("sys.exit(0)", "it ended its process with exit code 0"),
        ("os._exit(3)", "it ended its process with exit code 3"),
        ("ctypes.string_at(0)", "it ended its process by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", "it ended its process by SIGKILL"),
    ],
)
def test_what_is_no_reward_fails_that_sample_alone(
    scoring: Scoring, answer: str, said: str
) -> None:
    body = f"{LENGTH}    return len(sample.response) if sample.index != 7 else {answer}\n"
    [(index, error)] = only_failed(scoring.score(body)).items()
    assert index == 7
    assert said in error


def test_numbers_of_all_kinds_are_rewards(scoring: Scoring) -> None:
    body = (
        "import numpy as np\n"
        "def reward(args, s): return [True, 1, 2.5, np.float32(3), np.array(4)][s.index]\n"
    )
    assert [s.reward for s in scoring.score(body, n=5)] == [1.0, 1.0, 2.5, 3.0, 4.0]


@pytest.mark.parametrize(
    "hang",
    ["time.sleep(60)", "re.match('(a+)+$', 'a' * 60 + 'b')", "1 in iter(int, 1)"],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_hang_costs_its_own_sample_and_no_other_is_scored_twice(
    scoring: Scoring, hang: str, workers: int
) -> None:
    body = (
        f"{LENGTH}    time.sleep(0.006)\n"
        f"    if sample.index in (5, 11): {hang}\n"
        "    return len(sample.response)\n"
    )
    scores = scoring.score(body, timeout_s=1.0, workers=workers)
    failed = only_failed(scores)
    assert sorted(failed) == [5, 11]
    assert set(failed.values()) == {"it took longer than reward.timeout_s = 1 s"}
    assert scoring.calls() == Counter(range(N))


def test_a_quick_function_that_hangs_once_still_gives_all_others(scoring: Scoring) -> None:
    body = f"{LENGTH}    if sample.index == 13: time.sleep(60)\n    return len(sample.response)\n"
    assert sorted(only_failed(scoring.score(body, timeout_s=0.3))) == [13]


def test_async_calls_run_side_by_side_with_a_timeout_each(scoring: Scoring) -> None:
    body = (
        "async def reward(args, sample):\n"
        "    log(sample)\n"
        "    await asyncio.sleep(60 if sample.index == 9 else 0.3)\n"
        "    return len(sample.response)\n"
    )
    began = time.monotonic()
    failed = only_failed(scoring.score(body, timeout_s=1.5))
    assert time.monotonic() - began < 8 < N * 0.3
    assert failed == {9: "it took longer than reward.timeout_s = 1.5 s"}
    assert scoring.calls() == Counter(range(N))


def test_an_async_function_that_blocks_is_found_out(scoring: Scoring) -> None:
    body = (
        "async def reward(args, sample):\n"
        "    await asyncio.sleep(0)\n"
        "    if sample.index == 2: time.sleep(60)\n"
        "    return len(sample.response)\n"
    )
    assert sorted(only_failed(scoring.score(body, n=8, timeout_s=0.5))) == [2]


def test_a_batched_function_gets_one_group_at_a_time(scoring: Scoring) -> None:
    body = (
        "def reward(args, samples):\n"
        "    assert len({s.group_index for s in samples}) == 1 and len(samples) == 4\n"
        "    if samples[0].group_index == 1: return [0.0]\n"
        "    if samples[0].group_index == 2: time.sleep(60)\n"
        "    if samples[0].group_index == 3: return 4\n"
        "    return [len(s.response) if s.index != 17 else None for s in samples]\n"
    )
    failed = only_failed(scoring.score(body, batched=True, timeout_s=0.5, workers=2))
    assert sorted(failed) == [*range(4, 16), 17]
    assert failed[4] == "it returned 1 rewards for 4 samples"
    assert "took longer" in failed[8]
    assert failed[12] == "it returned a int, not a list of rewards"
    assert failed[17] == "it returned None, not a number"


def test_a_dict_gives_its_reward_and_keeps_the_rest(scoring: Scoring) -> None:
    body = (
        "import numpy as np\n"
        "def reward(args, sample):\n"
        "    assert args.reward_key == 'r'\n"
        "    return {'r': 1, 'parts': np.arange(2), 'bad': float('nan'), 'o': Ellipsis}\n"
    )
    [score] = scoring.score(body, n=1, reward_key="r")
    assert score.reward == 1.0
    assert score.details == '{"r": 1, "parts": [0, 1], "bad": null, "o": "Ellipsis"}'
    [score] = scoring.score(body.replace("'r': 1", "'s': 1"), n=1, reward_key="r")
    assert "without reward.reward_key = 'r', but with ['bad', 'o', 'parts', 's']" in str(
        score.error
    )


def test_samples_that_need_no_call_get_none(scoring: Scoring) -> None:
    batch = samples(4)
    batch[1].status = Status.ABORTED
    batch[2].status = Status.FAILED
    batch[3].reward = 0.5
    with scoring.scorer(LENGTH + "    return len(sample.response)\n") as scorer:
        scores = scorer.score_now(batch)
    assert [s.reward for s in scores] == [0.0, None, None, 0.5]
    assert scores[1].error == "its generation ended as aborted"
    assert scoring.calls() == Counter([0])


def test_too_many_failures_stop_at_once(scoring: Scoring) -> None:
    body = f"{LENGTH}    time.sleep(60 if sample.index == 3 else 0)\n    return 1\n"
    began = time.monotonic()
    with pytest.raises(RewardError) as caught:
        scoring.score(body, max_failed=0.0, timeout_s=0.5)
    assert time.monotonic() - began < 5
    for part in ("1 of 40 samples", "sample 3 (prompt p0)", "took longer", "mine.py:reward"):
        assert part in str(caught.value)
    allowed = scoring.score(
        f"{LENGTH}    return None if sample.index == 3 else 1\n", max_failed=0.025
    )
    assert allowed[3].error is not None


def test_after_an_error_the_scorer_works_again(scoring: Scoring) -> None:
    body = f"{LENGTH}    return None if sample.index == 30 else len(sample.response)\n"
    with scoring.scorer(body, max_failed=0.0) as scorer:
        for _ in range(2):
            with pytest.raises(RewardError):
                scorer.score_now(samples())
            assert [s.reward for s in scorer.score_now(samples(8))] == list(range(8))


def test_a_worker_that_was_killed_while_idle_is_replaced_and_nobody_is_blamed(
    scoring: Scoring,
) -> None:
    with scoring.scorer("def reward(args, sample): return os.getpid()") as scorer:
        [first] = scorer.score_now(samples(1))
        os.kill(int(first.reward or 0), signal.SIGKILL)
        time.sleep(0.1)
        [second] = scorer.score_now(samples(1))
        assert second.error is None
        assert second.reward != first.reward


def test_a_function_that_cannot_be_loaded_is_a_plugin_error(scoring: Scoring) -> None:
    with pytest.raises(PluginError, match="has no function 'reward'"):
        scoring.score("x = 1")
    with pytest.raises(PluginError, match="ModuleNotFoundError"):
        scoring.score("import no_such_package_here")
    with pytest.raises(PluginError, match="when loaded, it ended its process with exit code 4"):
        scoring.score("os._exit(4)")


def test_what_a_function_prints_disturbs_nothing(scoring: Scoring) -> None:
    body = f"{LENGTH}    print('noise' * 1000); sys.stderr.write('x'); input_ = sys.stdin.read()\n"
    assert not only_failed(scoring.score(body + "    return len(sample.response)\n"))


def test_check_and_trial(scoring: Scoring) -> None:
    good = scoring.config("def reward(args, sample): return 1")
    check_reward(good)
    assert try_reward(good, samples(1)[0]).reward == 1.0
    with pytest.raises(PluginError, match=r"called as \(args, sample\)"):
        check_reward(scoring.config("def reward(sample): return 1"))
    with pytest.raises(RewardError, match="it raised IndexError"):
        try_reward(scoring.config("def reward(args, sample): return [][0]"), samples(1)[0])
    with pytest.raises(RewardError, match="took longer"):
        slow = scoring.config("def reward(args, sample): time.sleep(60)", timeout_s=0.3)
        try_reward(slow, samples(1)[0])


def test_a_pause_of_the_whole_machine_is_nobodys_timeout(scoring: Scoring, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    config = scoring.config(
        "def reward(args, sample):\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(0.5)\n"
        "    return 1\n"
    )
    parent = _try_in_another_process(config.custom_rm_path, timeout_s=1.0)
    both = [parent.pid, _read_pid(pid_file)]
    for pid in both:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2)
    for pid in both:
        os.kill(pid, signal.SIGCONT)
    assert parent.wait(20) == 0


def test_workers_end_with_their_parent_whatever_they_do(scoring: Scoring, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    config = scoring.config(
        "def reward(args, sample):\n"
        f"    open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        "    re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    parent = _try_in_another_process(config.custom_rm_path, timeout_s=100.0)
    worker = _read_pid(pid_file)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and _runs(worker):
        time.sleep(0.05)
    assert not _runs(worker)


def _try_in_another_process(path: str, timeout_s: float) -> subprocess.Popen[bytes]:
    code = (
        "from rlcore.config.tree import RewardConfig\n"
        "from rlcore.rollout.rewards import try_reward\n"
        "from rlcore.sample import Sample, Status\n"
        f"config = RewardConfig(custom_rm_path={path!r}, timeout_s={timeout_s})\n"
        "try_reward(config, Sample(status=Status.COMPLETED))\n"
    )
    return subprocess.Popen([sys.executable, "-c", code])


def _read_pid(file: Path) -> int:
    deadline = time.monotonic() + 20
    while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(file.read_text())


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_workers_start_light(scoring: Scoring) -> None:
    body = (
        "def reward(args, sample):\n"
        "    heavy = {'torch', 'ray', 'transformers', 'pydantic', 'httpx', 'numpy', 'pyarrow'}\n"
        "    assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "    return 0\n"
    )
    assert scoring.score(body, n=1) == [Score(0.0)]


def test_a_cheap_function_costs_little(scoring: Scoring) -> None:
    with scoring.scorer("def reward(args, sample): return 1.0") as scorer:
        batch = samples(512)
        scorer.score_now(batch)
        seconds = []
        for _ in range(5):
            began = time.perf_counter()
            scorer.score_now(batch)
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.1, f"512 samples took {min(seconds):.3f} s"
