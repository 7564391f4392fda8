"""Functions of one's own in training do what ours do when they say the same, and what they get
wrong is told with the name of the setting.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import PluginError
from rlcore.train.custom import Functions, Given

GRPO = '''
import torch

def loss(args, batch, logits, sum_of_sample_mean):
    """The clipped loss, written out over whole responses."""
    logits = logits[0] / args.rollout_temperature
    new, start = [], 0
    lengths = zip(batch["total_lengths"], batch["response_lengths"])
    for tokens, (n, r) in zip(batch["unconcat_tokens"], lengths):
        rows = logits[start + n - r - 1 : start + n - 1].log_softmax(-1)
        new.append(rows.gather(-1, tokens[-r:, None])[:, 0])
        start += n
    assert start == len(logits) == batch["tokens"].shape[1]
    new, old = torch.cat(new), torch.cat(batch["log_probs"])
    advantages = torch.cat(batch["advantages"])
    ratio = (new - old).exp()
    low, high = 1 - args.clip_low, 1 + args.clip_high
    pg = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    total = sum_of_sample_mean(pg)
    return total, {"pg_loss": total.detach(), "mine": sum_of_sample_mean(torch.ones_like(pg))}
'''
ADVANTAGE = '''
import torch

def advantage(args, rollout_data):
    """That of REINFORCE++ by hand."""
    made = []
    kls = zip(rollout_data["kl"], rollout_data["loss_masks"])
    for reward, (kl, mask) in zip(rollout_data["rewards"], kls):
        trained = mask.nonzero()[:, 0].tolist()
        own, after = torch.zeros(len(mask), dtype=torch.float64), 0.0
        for t in reversed(trained):
            after = reward if t == trained[-1] else args.gamma * after
            after = after - args.kl_coef * float(kl[t])
            own[t] = after
        made.append(own)
    rollout_data["advantages"] = rollout_data["returns"] = made
'''
TIS = '''
import torch

def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths,
        response_lengths, **kwargs):
    """Truncation and a mask, as ours has them."""
    weights = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp().detach()
    inside = (weights >= args.tis_clip_low) & (weights <= args.tis_clip)
    masks = [m * i for m, i in zip(loss_masks, inside.split(response_lengths))]
    assert [t - r > 0 for t, r in zip(total_lengths, response_lengths)]
    return pg_loss * weights, masks, {"tis": weights, "mine": 2.0}
'''
REDUCER = '''
def reducer(total_lengths, response_lengths, masks, per_token):
    """The mean over a sequence, or the sum over tokens, as ours."""
    def reduce(x):
        parts = zip(x.split(response_lengths), masks)
        return sum((a * m).sum() / (1 if per_token else m.sum().clamp(min=1)) for a, m in parts)
    return reduce
'''


def put(folder: Path, text: str, name: str) -> str:
    file = folder / f"{name}.py"
    file.write_text(text)
    return f"{file}:{name}"


def trained(make_trainer: Any, toy: Any, settings: dict[str, Any], **cut: Any) -> dict[str, float]:
    """Metrics of two batches; the second from a policy that has moved."""
    trainer = make_trainer(algorithm=AlgorithmConfig(**settings), temperature=0.9)
    batch = toy.shares(toy.random_sequences(9), 1, **{"micro_batches": 4} | cut)[0]
    trainer.train("start", "a", batch)
    found: dict[str, float] = trainer.train("a", "b", batch).metrics
    return found


def same(ours: dict[str, float], theirs: dict[str, float], *names: str) -> None:
    for name in ("loss", "grad_norm", *names):
        assert theirs[name] == pytest.approx(ours[name], abs=2e-5, rel=2e-5), name
    assert abs(ours["grad_norm"]) > 1e-3


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_a_loss_that_says_the_same_trains_the_same(
    tmp_path: Path, make_trainer: Any, toy: Any, how: Any
) -> None:
    plain = {"loss_aggregation": how, "clip_high": 0.1}
    own = plain | {"custom_loss_function_path": put(tmp_path, GRPO, "loss")}
    ours = trained(make_trainer, toy, plain, num_steps=2)
    theirs = trained(make_trainer, toy, own, num_steps=2)
    same(ours, theirs, "pg_loss", "train_rollout_logprob_abs_diff")
    assert theirs["mine"] == pytest.approx(1.0)


def test_a_loss_over_the_engine_s_log_probs_still_shows_the_gap(
    tmp_path: Path, make_trainer: Any, toy: Any
) -> None:
    plain = {"use_rollout_logprobs": True}
    own = plain | {"custom_loss_function_path": put(tmp_path, GRPO, "loss")}
    ours, theirs = trained(make_trainer, toy, plain), trained(make_trainer, toy, own)
    same(ours, theirs, "train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max")


def test_advantages_that_say_the_same_train_the_same(
    tmp_path: Path, make_trainer: Any, toy: Any
) -> None:
    plain = {"advantage_estimator": "reinforce_plus_plus", "kl_coef": 0.3, "gamma": 0.9}
    own = plain | {"custom_advantage_function_path": put(tmp_path, ADVANTAGE, "advantage")}
    same(trained(make_trainer, toy, plain), trained(make_trainer, toy, own), "rollout/kl")


def test_returns_of_a_function_train_the_critic(
    tmp_path: Path, make_trainer: Any, toy: Any
) -> None:
    plain = {"advantage_estimator": "ppo", "custom_advantage_function_path": ""}
    text = ADVANTAGE.replace("args.gamma", "1.0")
    plain["custom_advantage_function_path"] = put(tmp_path, text, "advantage")
    assert trained(make_trainer, toy, plain)["value_loss"] > 0
    text = text.replace('rollout_data["returns"] = ', "")
    plain["custom_advantage_function_path"] = put(tmp_path, text, "advantage")
    with pytest.raises(PluginError, match=r"must set rollout_data\['returns'\]"):
        trained(make_trainer, toy, plain)


@pytest.mark.parametrize("how", ["token_mean", "sequence_mean"])
def test_weights_and_a_reduction_that_say_the_same_train_the_same(
    tmp_path: Path, make_trainer: Any, toy: Any, how: Any
) -> None:
    plain = {
        "use_tis": True,
        "tis_mode": "mask",
        "tis_clip": 1.05,
        "tis_clip_low": 0.9,
        "loss_aggregation": how,
    }
    own = plain | {"custom_tis_function_path": put(tmp_path, TIS, "tis")}
    ours, theirs = trained(make_trainer, toy, plain), trained(make_trainer, toy, own)
    same(ours, theirs, "tis")
    assert 0 < ours["tis_clipfrac"] < 1 and theirs["mine"] == pytest.approx(2.0)
    # A reduction over what the function kept divides by less: so without weights.
    bare = {"loss_aggregation": how}
    reduced = bare | {"custom_pg_loss_reducer_function_path": put(tmp_path, REDUCER, "reducer")}
    same(trained(make_trainer, toy, bare), trained(make_trainer, toy, reduced), "pg_loss")


def test_ranks_without_samples_take_part(
    tmp_path: Path, toy: Any, two_ranks: Any, one_rank: Any, model_folder: Path
) -> None:
    own = {
        "custom_loss_function_path": put(tmp_path, GRPO, "loss"),
        "custom_advantage_function_path": put(
            tmp_path, ADVANTAGE.replace("args.gamma", "1.0"), "advantage"
        ),
    }
    job = {"algorithm": AlgorithmConfig(**own)}
    sequences = toy.random_sequences(1)
    runs = [
        ranks.run(model_folder, [toy.shares(sequences, world)], **job)[0]["reports"][0]
        for world, ranks in ((1, one_rank), (2, two_ranks))
    ]
    same(runs[0], runs[1], "mine")


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "body", "said"),
    [
        ("loss", "return 1.0", r"must return \(loss, metrics\), not a float"),
        ("loss", "return torch.tensor(1.0), {}", "the loss has no gradient"),
        ("loss", "return logits.sum(-1), {}", r"one number as a tensor, not a Tensor of shape"),
        ("loss", "return logits.sum() * float('nan'), {}", "the loss is nan"),
        ("loss", "return logits.sum(), {'x': logits[0]}", "x must be one number"),
        ("loss", "return batch['lengths']", "lengths; there are advantages, "),
        ("loss", "return sum_of_sample_mean(logits[0, :, 0]), {}", "one for each of the"),
        ("advantage", "pass", r"must set rollout_data\['advantages'\]"),
        ("advantage", "rollout_data['advantages'] = [torch.ones(2)]", "a list of tensors of"),
        (
            "advantage",
            "rollout_data['advantages'] = [m * float('inf') for m in rollout_data['loss_masks']]",
            "inf at a trained token",
        ),
        ("tis", "return pg_loss", r"must return \(pg_loss, masks, metrics\)"),
        ("tis", "return pg_loss[1:], loss_masks, {}", "one number for each of the"),
        ("tis", "return pg_loss, loss_masks[1:], {}", "the masks: a list of tensors"),
        ("tis", "return pg_loss, loss_masks, 3", "the metrics must be a dict, not a int"),
        ("pg_loss_reducer", "return 1.0", "must return a function, not a float"),
        ("pg_loss_reducer", "return lambda x: x", "the reduced loss must be one number"),
        ("pg_loss_reducer", "return lambda x: x / 0 if x else 1 / 0", "raised"),
    ],
)
def test_what_a_function_gets_wrong_names_its_setting_and_leaves_the_trainer_as_it_was(
    tmp_path: Path, make_trainer: Any, toy: Any, setting: str, body: str, said: str
) -> None:
    heads = {
        "loss": "args, batch, logits, sum_of_sample_mean",
        "advantage": "args, rollout_data",
        "tis": "args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **more",
        "pg_loss_reducer": "total_lengths, response_lengths, masks, per_token",
    }
    spec = put(tmp_path, f"import torch\ndef f({heads[setting]}):\n    {body}\n", "f")
    name = f"custom_{setting}_function_path"
    settings = {name: spec} | ({"use_tis": True} if setting == "tis" else {})
    trainer = make_trainer(algorithm=AlgorithmConfig(**settings))
    before = trainer.digest()
    batch = toy.shares(toy.random_sequences(3), 1)[0]
    with pytest.raises(PluginError, match=rf"algorithm\.{name} = .*{said}"):
        trainer.train("start", "a", batch)
    assert (trainer.loaded, trainer.dirty) == ("start", False)
    assert trainer.digest() == before


def test_a_function_that_cannot_be_called_is_found_at_once(tmp_path: Path) -> None:
    spec = put(tmp_path, "def f(args, batch): ...", "f")
    with pytest.raises(PluginError, match="it is called as"):
        Functions(AlgorithmConfig(custom_loss_function_path=spec))
    positional = put(tmp_path, "def g(a, b, c, d, e, f, h): ...", "g")
    with pytest.raises(PluginError, match="it is called as"):
        Functions(AlgorithmConfig(use_tis=True, custom_tis_function_path=positional))


def test_what_stands_at_masked_tokens_never_matters(tmp_path: Path) -> None:
    text = (
        "import torch\n"
        "def f(args, rollout_data):\n"
        "    rollout_data['advantages'] = torch.tensor([1.0, float('nan'), 2.0])\n"
    )
    own = Functions(AlgorithmConfig(custom_advantage_function_path=put(tmp_path, text, "f")))
    masks: list[Tensor] = [torch.tensor([1.0, 0.0]), torch.tensor([1.0])]
    [found] = own.advantages(Given(), masks, with_returns=False)
    assert found[0][0] == 1.0 and found[1].tolist() == [2.0]
