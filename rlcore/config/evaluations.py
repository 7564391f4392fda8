"""What the settings of evaluations need of each other, and of the run's own.

Invariant: what a data set does not say is as the run has it, so a rule is about what comes of both.
"""

from typing import TYPE_CHECKING

from rlcore.config.data import EvalDataset

if TYPE_CHECKING:
    from rlcore.config.tree import RunConfig


def check_evaluations(config: "RunConfig") -> None:
    """Each data set can be answered as it says.

    Raises:
        ValueError: naming the setting and the data set.
    """
    own = config.rollout.custom_generate_function_path or config.eval.eval_function_path
    for one in config.eval.datasets:
        _check_type(config, one)
        # A function of one's own may go by these settings in its own way.
        if not (own or config.data.generate_function_key or one.custom_generate_function_path):
            _check_sampling(config, one)
            _check_lengths(config, one)


def _check_type(config: "RunConfig", one: EvalDataset) -> None:
    """Functions may read `rm_type` as they like; built-in types are chosen by it."""
    if one.rm_type and not (config.reward.custom_rm_path or one.custom_rm_path):
        config.reward.check_type(one.rm_type, f"rm_type of eval.datasets {one.name!r}")


def _check_sampling(config: "RunConfig", one: EvalDataset) -> None:
    rollout, count = config.rollout, one.n_samples_per_eval_prompt
    top_k = rollout.top_k if one.top_k is None else one.top_k
    where, cold = f"of eval.datasets {one.name!r}", one.temperature == 0
    if top_k == 0:
        raise ValueError(
            f"top_k = 0 {where} leaves no token to sample; use -1 (off) or 1 and up, or remove it"
        )
    if count > 1 and (cold or top_k == 1):
        same, mend = (
            ("temperature = 0", "a temperature above 0") if cold else ("top_k = 1", "another top_k")
        )
        raise ValueError(
            f"{same} {where} gives the same response n_samples_per_eval_prompt = {count} times; "
            f"use {mend}, or 1"
        )
    # Who says that it is 0 knows what comes of it.
    if cold and "temperature" not in one.model_fields_set:
        chosen = {"top_p": one.top_p != 1.0, "top_k": one.top_k not in (None, -1, 1)}
        if name := next((name for name, said in chosen.items() if said), None):
            raise ValueError(
                f"{name} = {getattr(one, name)} {where} has no effect with temperature = 0, which "
                "it is unless it is set: set a temperature above 0, or remove it"
            )


def _check_lengths(config: "RunConfig", one: EvalDataset) -> None:
    rollout, where = config.rollout, f"of eval.datasets {one.name!r}"
    whole, own = rollout.context_length, one.max_response_len
    longest = own or rollout.max_response_len
    if whole is not None and own is not None and whole <= own:
        raise ValueError(
            f"rollout.context_length = {whole} leaves no room for a prompt beside "
            f"max_response_len = {own} {where}"
        )
    if (one.min_new_tokens or 0) > longest:
        raise ValueError(
            f"min_new_tokens = {one.min_new_tokens} {where} is above the most tokens that a "
            f"response may have, {longest}; lower it, or raise max_response_len"
        )
