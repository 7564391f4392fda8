"""What an engine accepts, checked before anything is sent.

A real SGLang server ends on a token id outside the vocabulary (a device-side assert) and answers
500 to a sampling parameter that it does not know. Invariant: a request that passes `check_request`
does neither.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, DataError, EngineError

SAMPLING_PARAMS = frozenset(
    [
        "custom_params",
        "ebnf",
        "frequency_penalty",
        "ignore_eos",
        "json_schema",
        "logit_bias",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "n",
        "no_stop_trim",
        "presence_penalty",
        "regex",
        "repetition_penalty",
        "sampling_seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "stream_interval",
        "structural_tag",
        "temperature",
        "top_k",
        "top_p",
    ]
)
"""Names that SGLang's sampling parameters may have."""


ROW_PARAMS = frozenset(
    [
        "max_new_tokens",
        "no_stop_trim",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_regex",
        "stop_token_ids",
    ]
)
"""Those that a row to train on may set: they say where a response ends and how it is written. The
others change the probabilities of its tokens, and the trainer would compute other ones."""
ROW_PARAMS_KEY = "sampling_params"
"""Key in a sample's metadata."""


def check_row_params(params: Any, where: str, *, evaluation: bool) -> None:
    """See that a row's own sampling parameters can be used.

    Raises:
        DataError: naming the row, the parameter and what is allowed.
    """
    if not isinstance(params, dict):
        raise DataError(f"{where} must be an object of sampling parameters; it is {params!r:.80}")
    known = SAMPLING_PARAMS - {"n", "sampling_seed", "stream_interval"}
    allowed = known if evaluation else ROW_PARAMS
    wrong = sorted(set(params) - allowed)
    if wrong:
        why = (
            "engines know no such parameter, or it is not a row's to set"
            if evaluation or wrong[0] not in known
            else "it changes the probabilities of tokens, which the trainer computes by the run's "
            "own settings"
        )
        raise DataError(
            f"{where} sets {wrong[0]!r}: {why}; allowed are {', '.join(sorted(allowed))}"
        )
    try:
        _check_numbers(params)
    except EngineError as error:
        raise DataError(f"{where}: {error}") from None


@dataclass(frozen=True)
class Limits:
    """What a model and its engine can take.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        context_length: most tokens of prompt and response together.
        image_token: id that stands for images in a prompt; None: the model takes none.
        routes: layers, and experts a token in one; None: the model has no experts.
    """

    vocab_size: int
    context_length: int
    image_token: int | None = None
    routes: tuple[int, int] | None = None

    @classmethod
    def of_model(cls, folder: str | Path, context_length: int | None = None) -> "Limits":
        """Read from a Hugging Face folder's config.json.

        Args:
            folder: the model's.
            context_length: the engine's own limit, where it is set.

        Raises:
            ConfigError: there is no config.json, or it names no vocabulary size.
        """
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            raise ConfigError(f"model folder {folder} has no config.json") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from None
        config = config | config.get("text_config", {})
        if not isinstance(config.get("vocab_size"), int):
            raise ConfigError(f"{path} has no vocab_size")
        longest = context_length or config.get("max_position_embeddings")
        if not isinstance(longest, int):
            raise ConfigError(
                f"{path} has no max_position_embeddings; set rollout.context_length instead"
            )
        routes = config.get("num_hidden_layers"), config.get("num_experts_per_tok")
        return cls(
            config["vocab_size"],
            longest,
            config.get("image_token_id"),
            routes if all(routes) else None,
        )

    def response_budget(self, prompt_length: int, wanted: int) -> int:
        """Tokens a response may have: what the context leaves of those wanted; may be negative."""
        return min(wanted, self.context_length - prompt_length)


def check_request(input_ids: list[int], params: dict[str, Any], limits: Limits | None) -> None:
    """Refuse what would be answered with an error, or would end the server.

    Raises:
        EngineError: naming the id or parameter and what is allowed.
    """
    if not input_ids:
        raise EngineError("a request has no input ids")
    unknown = sorted(set(params) - SAMPLING_PARAMS)
    if unknown:
        raise EngineError(f"engines know no sampling parameter {', '.join(map(repr, unknown))}")
    _check_numbers(params)
    if limits is None:
        return
    if min(input_ids) < 0 or max(input_ids) >= limits.vocab_size:
        bad = next(t for t in input_ids if not 0 <= t < limits.vocab_size)
        raise EngineError(
            f"token id {bad} is outside the model's vocabulary of {limits.vocab_size}; tokenizer "
            "and model do not belong together"
        )
    total = len(input_ids) + params.get("max_new_tokens", 0)
    if total > limits.context_length:
        raise EngineError(
            f"{len(input_ids)} input tokens and max_new_tokens = {params.get('max_new_tokens', 0)} "
            f"exceed the context of {limits.context_length} tokens"
        )


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: v >= 0, "0 or more"),
    "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "min_p": (lambda v: 0 <= v <= 1, "between 0 and 1"),
    "top_k": (lambda v: v == -1 or v >= 1, "-1 (off), or 1 or more"),
    "max_new_tokens": (lambda v: v >= 0, "0 or more"),
    "min_new_tokens": (lambda v: v >= 0, "0 or more"),
    "sampling_seed": (lambda v: True, "a whole number"),
    "n": (lambda v: v == 1, "1; send the prompt as often as responses are wanted"),
}
_WHOLE = frozenset({"top_k", "max_new_tokens", "min_new_tokens", "sampling_seed", "n"})


def _check_numbers(params: dict[str, Any]) -> None:
    for name, (accepts, text) in _ALLOWED.items():
        value = params.get(name)
        if value is None:
            continue
        number = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(
            value, bool
        )
        if not number or not math.isfinite(value) or not accepts(value):
            raise EngineError(
                f"sampling parameter {name} = {value!r} is not allowed; it must be {text}"
            )
