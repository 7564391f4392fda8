"""`check_plugin`: good functions of every kind pass, and each breach of a contract is named."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flows.commands.check_plugin import check, quickstart_model
from flows.exit_codes import DONE, FAILED
from rlcore import plugin_check
from rlcore.engine.launch import EngineProcess
from rlcore.errors import PluginError
from rlcore.plugin_check import Finding, check_plugin, kind_of
from rlcore.plugins import Kind


def wrong(found: list[Finding]) -> dict[str, str]:
    return {one.what: one.problem for one in found if one.problem}


def tried(folder: Path, body: str, kind: Kind, **options: object) -> dict[str, str]:
    file = folder / "mine.py"
    file.write_text(f"import random, time\n{body}")
    return wrong(check_plugin(f"{file}:f", kind, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quickstart_model(tmp_path_factory.mktemp("model") / "made")


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    """One engine for all checks, started by the first: each start takes seconds. They ask for the
    same model.
    """
    running: list[EngineProcess] = []

    class Shared(EngineProcess):
        def start(self, argv: Sequence[str], log_path: str | Path, env: object = None) -> None:
            if not running:
                super().start(argv, log_path)
                running.append(self)
            self.url, self._process = running[0].url, running[0]._process

        def stop(self, timeout: float = 10.0) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_check, "EngineProcess", Shared)
        yield
    for one in running:
        EngineProcess.stop(one)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("def f(args, sample, **kwargs): ...", "reward"),
        ("async def f(args, sample, sampling_params, evaluation=False): ...", "generate"),
        ("def f(folder, seed): ...", "build"),
        ("def f(args, sample, *, rollout_id, evaluation): ...", "sample_hook"),
        ("async def f(args, sample, evaluation=False): ...", "sample_hook"),
    ],
)
def test_parameters_tell_what_a_function_is_for(tmp_path: Path, head: str, kind: str) -> None:
    (tmp_path / "m.py").write_text(head)
    assert kind_of(f"{tmp_path}/m.py:f") == kind


def test_parameters_that_do_not_tell_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(args, samples): ...\ndef g(x): ...")
    with pytest.raises(PluginError, match=r"--kind: batched_.*_post_process, convert_samples$"):
        kind_of(f"{tmp_path}/m.py:f")
    with pytest.raises(PluginError, match=r"--kind: generate, group_generate, "):
        kind_of(f"{tmp_path}/m.py:g")


def test_a_reward_function(tmp_path: Path) -> None:
    good = "def f(args, sample, **kwargs): return float(str(sample.label) in sample.response)"
    assert tried(tmp_path, good, "reward") == {}
    strict = "def f(args, sample): return float(sample.response.endswith(sample.label))"
    found = tried(tmp_path, strict, "reward")
    assert set(found) == {"a label that is a number", "no label"}
    assert "TypeError" in found["no label"]
    dice = "def f(args, sample): return random.random()"
    assert set(tried(tmp_path, dice, "reward")) == {"the same again"}
    keyed = "def f(args, sample): return {'score': 1}"
    assert len(tried(tmp_path, keyed, "reward")) == 8
    assert tried(tmp_path, keyed, "reward", reward_key="score") == {}


def test_a_batched_reward_function(tmp_path: Path) -> None:
    good = "def f(args, samples): return [len(s.response) for s in samples]"
    assert tried(tmp_path, good, "batched_reward") == {}
    one = "def f(args, samples): return [1.0]"
    assert len(tried(tmp_path, one, "batched_reward")) == 8


def test_a_filter(tmp_path: Path) -> None:
    good = "def f(args, samples): return len({s.reward for s in samples}) > 1, 'equal'"
    assert tried(tmp_path, good, "filter") == {}
    four = "def f(args, samples): return sum(s.reward for s in samples) / samples[3].reward > 0"
    assert set(tried(tmp_path, four, "filter")) == {
        "a group with both rewards",
        "a group that is never right",
        "a group of two, where others failed",
    }
    assert "return a bool" in str(tried(tmp_path, "def f(args, samples): return 1", "filter"))


def test_a_build_function(tmp_path: Path) -> None:
    good = (
        "def f(folder, seed):\n"
        "    (folder / 'config.json').write_text('{}')\n"
        "    (folder / 'm.safetensors').write_text(str(seed))\n"
    )
    assert tried(tmp_path, good, "build") == {}
    found = tried(tmp_path, good.replace("str(seed)", "str(time.time_ns())"), "build")
    assert found == {"the same again": "other bytes from the same seed in m.safetensors"}
    lacking = good.replace("config.json", "x.json")
    assert tried(tmp_path, lacking, "build") == {"a model folder": "it wrote no config.json"}
    raising = "def f(folder, seed): 1 / 0"
    assert "ZeroDivisionError" in tried(tmp_path, raising, "build")["a model folder"]


GENERATE = (
    "from rlcore.rollout.generate import apply_result\n"
    "async def f(args, sample, sampling_params):\n"
    "    apply_result(sample, await args.generate(sample.tokens, sampling_params))\n"
    "    return sample\n"
)


def test_a_generate_function(tmp_path: Path, model: Path) -> None:
    assert tried(tmp_path, GENERATE, "generate", model=model) == {}
    seedless = GENERATE.replace("sampling_params))", "sampling_params | {'sampling_seed': None}))")
    found = tried(tmp_path, seedless, "generate", model=model)
    assert set(found) == {"the same again"} and "sampling_params" in found["the same again"]
    forgotten = "async def f(args, sample, sampling_params): return sample"
    assert "status pending" in tried(tmp_path, forgotten, "generate", model=model)["two samples"]


def test_other_kinds_are_looked_at_by_their_parameters(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f(args, rollout_id, buffer, num_samples): return buffer")
    spec = f"{tmp_path}/m.py:f"
    assert kind_of(spec) == "buffer_filter"
    assert check_plugin(spec, "buffer_filter") == [Finding("its parameters")]
    with pytest.raises(PluginError, match="it is called as"):
        check_plugin(spec, "sample_filter")


def test_a_generate_function_of_a_group(tmp_path: Path, model: Path) -> None:
    whole = (
        "from rlcore.rollout.generate import apply_result\n"
        "async def f(args, samples, sampling_params):\n"
        "    for sample, own in zip(samples, sampling_params):\n"
        "        apply_result(sample, await args.generate(sample.tokens, own))\n"
        "    return samples\n"
    )
    assert tried(tmp_path, whole, "group_generate", model=model) == {}


def test_a_sample_hook(tmp_path: Path, model: Path) -> None:
    good = (
        "async def f(args, sample, *, rollout_id, evaluation):\n"
        "    sample.loss_mask = [0] * sample.response_length\n"
    )
    assert tried(tmp_path, good, "sample_hook", model=model) == {}
    text = "def f(args, sample): return sample.response"
    assert "returned a str" in tried(tmp_path, text, "sample_hook", model=model)["two samples"]
    dice = "def f(args, sample): sample.reward = random.random()"
    assert set(tried(tmp_path, dice, "sample_hook", model=model)) == {"the same again"}
    with pytest.raises(PluginError, match="it is called as"):
        tried(tmp_path, "def f(args, sample, *, told): ...", "sample_hook", model=model)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text("def f(args, sample): return len(sample.label)\n")
    spec, options = f"{tmp_path}/m.py:f", {"reward_key": None, "model": None}
    assert check(spec, None, as_json=False, **options) == FAILED  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "ok     a right answer\n" in printed
    assert "wrong  no label: it raised TypeError" in printed
    (tmp_path / "g.py").write_text(GENERATE)
    generate = f"{tmp_path}/g.py:f"
    assert check(generate, None, as_json=True, **options) == DONE  # type: ignore[arg-type]
    assert '"kind": "generate"' in capsys.readouterr().out
    with pytest.raises(PluginError, match="--kind nonsense: it is one of generate, "):
        check(spec, "nonsense", as_json=False, **options)  # type: ignore[arg-type]


TRAINING = {
    "reward_post_process": "def f(args, samples): return [0.0] * 8, [s.reward for s in samples]",
    "convert_samples": (
        "def f(args, samples):\n"
        "    columns = {'tokens': [s.tokens for s in samples], 'rewards': [0.0] * 8}\n"
        "    return columns | {'response_lengths': [s.response_length for s in samples]}\n"
    ),
    "advantage": (
        "def f(args, rollout_data):\n"
        "    columns = zip(rollout_data['rewards'], rollout_data['loss_masks'])\n"
        "    rollout_data['advantages'] = [r * m for r, m in columns]\n"
    ),
    "tis": (
        "def f(args, *, loss_masks, pg_loss, train_log_probs, rollout_log_probs, total_lengths, "
        "response_lengths, **kwargs): return pg_loss * 0.5, loss_masks, {'x': pg_loss}"
    ),
    "pg_loss_reducer": (
        "def f(total_lengths, response_lengths, masks, per_token): return lambda x: x.mean()"
    ),
    "loss": (
        "def f(args, batch, logits, sum_of_sample_mean):\n"
        "    mean = logits[0, : sum(batch['response_lengths'])].logsumexp(-1)\n"
        "    return sum_of_sample_mean(mean), {'x': 1}\n"
    ),
}


@pytest.mark.parametrize("kind", TRAINING)
def test_a_function_of_the_trainer(tmp_path: Path, kind: Kind) -> None:
    assert tried(tmp_path, TRAINING[kind], kind) == {}
    if kind not in ("reward_post_process", "convert_samples"):
        assert kind_of(f"{tmp_path}/mine.py:f") == kind


def test_what_is_wrong_with_a_function_of_the_trainer(tmp_path: Path) -> None:
    dice = TRAINING["advantage"].replace("r * m", "r * m * random.random()")
    assert "other numbers" in tried(tmp_path, dice, "advantage")["samples of several lengths"]
    cut = TRAINING["tis"].replace("* 0.5", ".detach()")
    assert "no gradient" in tried(tmp_path, cut, "tis")["samples of several lengths"]
    far = TRAINING["tis"].replace("pg_loss * 0.5", "pg_loss / (torch.cat(rollout_log_probs) < 10)")
    found = tried(tmp_path, f"import torch\n{far}", "tis")
    assert set(found) == {"policies that are far apart"}
    whole = TRAINING["loss"].replace("logits[0, : sum(batch['response_lengths'])]", "logits[0]")
    assert "response tokens" in tried(tmp_path, whole, "loss")["samples of several lengths"]


def test_a_source_of_prompts(tmp_path: Path, model: Path) -> None:
    good = (
        "class f:\n"
        "    def __init__(self, args): self.args, self.n = args, 0\n"
        "    def get_samples(self, num_samples):\n"
        "        self.n += num_samples\n"
        "        rows = range(self.n - num_samples, self.n)\n"
        "        return [self.args.group(k % self.args.rows) for k in rows]\n"
        "    def state_dict(self): return self.n\n"
        "    def load_state_dict(self, state): self.n = state\n"
    )
    assert tried(tmp_path, good, "data_source", model=model) == {}
    assert kind_of(f"{tmp_path}/mine.py:f") == "data_source"
    forgets = good.replace("self.n = state", "pass")
    found = tried(tmp_path, forgets, "data_source", model=model)
    assert set(found) == {"going on from its state"}
    dice = good.replace("k % self", "random.getrandbits(30) % self")
    assert "the same again" in tried(tmp_path, dice, "data_source", model=model)
    lacking = good.replace("state_dict(self):", "state(self):")
    assert "no method state_dict" in str(tried(tmp_path, lacking, "data_source", model=model))
