"""Functions of one's own in training: the numbers of rewards, the sequences made of samples,
advantages, importance weights, the reduction of the policy loss, and the whole loss.

Names, signatures and layout are slime's: per-token values are lists of one tensor a sample, [R],
its response; what a function gives back may be a list like that, or all of them end to end.

Invariants:
- What a function gives has the shape that is asked for, and is finite wherever a token is trained;
  else the error names the setting. What it gives at other tokens never matters.
- Importing this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlcore.config.tree import AlgorithmConfig
from rlcore.errors import PluginError, SluiceError
from rlcore.plugins import BY_NAME, TRAINING, Kind, load_checked
from rlcore.rollout.args import PluginArgs

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.algorithms.packing import TrainSequence
    from rlcore.sample import Sample

Reducer = Callable[["Tensor"], "Tensor"]


class Given(dict[str, Any]):
    """What a function is given by name. A name that is not there is told with those that are."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name}; there are {', '.join(sorted(self))}")


class Functions:
    """The functions that an algorithm names.

    Args:
        algorithm: the settings; attributes of `args`.
        temperature: of the rollout; `args.rollout_temperature`.

    Raises:
        PluginError: a function cannot be loaded, or called as its kind is.
    """

    def __init__(self, algorithm: AlgorithmConfig, temperature: float = 1.0) -> None:
        self._args = PluginArgs(algorithm.model_dump() | {"rollout_temperature": temperature})
        self._functions: dict[Kind, tuple[Callable[..., Any], str]] = {}
        for name, kind in TRAINING.items():
            path = getattr(algorithm, name)
            if path is not None:
                setting = f"algorithm.{name}"
                loaded = load_checked(path, setting, kind)
                self._functions[kind] = loaded, f"{setting} = {path!r}"

    def __contains__(self, kind: Kind) -> bool:
        return kind in self._functions

    @property
    def see_tokens(self) -> bool:
        """Whether a function is about the tokens of a micro-batch."""
        return bool(self._functions.keys() - {"reward_post_process", "convert_samples"})

    def numbers(self, samples: Sequence[Sample]) -> list[float]:
        """A number of each sample, made of all their rewards.

        Args:
            samples: those that may be trained, each with its reward as a number, in batch order.

        Raises:
            PluginError: the function fails, or gives something else.
        """
        what, answer = self._call("reward_post_process", list(samples))
        wanted = f"a pair of {len(samples)} rewards and {len(samples)} numbers to train with"
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise PluginError(f"{what} must return {wanted}, not {_kind(answer)}")
        numbers = answer[1].tolist() if hasattr(answer[1], "tolist") else list(answer[1])
        if len(numbers) != len(samples):
            raise PluginError(f"{what} returned {len(numbers)} numbers; it must return {wanted}")
        for k, number in enumerate(numbers):
            if not isinstance(number, int | float) or not math.isfinite(number):
                raise PluginError(f"{what} returned {number!r} for sample {samples[k].index}")
        return [float(number) for number in numbers]

    def sequences(self, samples: Sequence[Sample]) -> list[TrainSequence]:
        """What is trained of a batch.

        Args:
            samples: those that may be trained, each with its reward as a number, in batch order.

        Raises:
            PluginError: the function fails, or gives something else.
        """
        from rlcore.train.converted import to_sequences

        what, answer = self._call("convert_samples", list(samples))
        return to_sequences(answer, what)

    def advantages(
        self, data: Given, masks: Sequence[Tensor], *, with_returns: bool
    ) -> list[list[Tensor]]:
        """Advantages of each sample's tokens, and behind them returns where a critic needs them.

        Args:
            data: `rollout_data`; the function sets `advantages` and `returns` in it.
            masks: [R] of each sample, which tokens are trained.
            with_returns: whether there is a critic.
        """
        what, _ = self._call("advantage", data)
        found = []
        for name in ("advantages", "returns") if with_returns else ("advantages",):
            if name not in data:
                raise PluginError(f"{what} must set rollout_data[{name!r}]")
            found.append(_columns(data[name], masks, f"{what}: rollout_data[{name!r}]"))
        return found

    def weighed(
        self, loss: Tensor, given: Given, masks: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
        """The loss of each response token times its importance weight, new masks, and metrics.

        Args:
            loss: [sum R] of all responses, end to end, with its gradient.
            given: the other arguments by name.
            masks: [R] of each sample, which tokens are trained.
        """
        what, answer = self._call("tis", pg_loss=loss, **given)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise PluginError(f"{what} must return (pg_loss, masks, metrics), not {_kind(answer)}")
        weighed = _flat(answer[0], masks, f"{what}: the loss")
        found = _metrics(answer[2], what)
        for name, value in found.items():
            if getattr(value, "shape", None) != weighed.shape:
                found[name] = _number(value, f"{what}: {name}")
        return weighed, _columns(answer[1], masks, f"{what}: the masks"), found

    def reducer(self, given: Given) -> Reducer:
        """What makes one number of the losses of all response tokens [sum R]."""
        what, function = self._call("pg_loss_reducer", *given.values())
        if not callable(function):
            raise PluginError(f"{what} must return a function, not {_kind(function)}")

        def reduce(values: Tensor) -> Tensor:
            return _scalar(_guarded(what, function, values), f"{what}: the reduced loss")

        return reduce

    def loss(
        self, batch: Given, logits: Tensor, sum_of_sample_mean: Reducer
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss of a micro-batch, with its gradient, and metrics.

        Args:
            batch: what is known of its tokens.
            logits: [1, T, V] of all tokens, end to end, not divided by the temperature.
            sum_of_sample_mean: from values of all response tokens [sum R] to their share of the
                mean over the step, as `algorithm.loss_aggregation` has it.
        """
        what, answer = self._call("loss", batch, logits, sum_of_sample_mean)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise PluginError(f"{what} must return (loss, metrics), not {_kind(answer)}")
        loss = _scalar(answer[0], f"{what}: the loss")
        if logits.requires_grad and not loss.requires_grad:
            raise PluginError(f"{what}: the loss has no gradient; compute it from the logits")
        found = _metrics(answer[1], what)
        return loss, {name: _number(value, f"{what}: {name}") for name, value in found.items()}

    def _call(self, kind: Kind, *args: Any, **named: Any) -> tuple[str, Any]:
        function, what = self._functions[kind]
        first = () if kind == "pg_loss_reducer" else (self._args,)
        assert kind in BY_NAME or not named
        return what, _guarded(what, function, *first, *args, **named)


def _guarded(what: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    import torch

    try:
        return function(*args, **named)
    except (SluiceError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # A custom function may raise anything; the batch cannot be trained without it.
        raise PluginError(f"{what} raised {type(error).__name__}: {error}") from error


def _scalar(value: Any, what: str) -> Tensor:
    import torch

    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise PluginError(f"{what} must be one number as a tensor, not {_kind(value)}")
    if not bool(torch.isfinite(value.detach()).all()):
        raise PluginError(f"{what} is {value.item()}")
    return value.reshape(())


def _number(value: Any, what: str) -> Any:
    """A metric: one number, finite or not, as a tensor without other dimensions or a float."""
    if getattr(value, "shape", None) is not None:
        if math.prod(value.shape) != 1:
            raise PluginError(f"{what} must be one number, not {_kind(value)}")
        return value.reshape(())
    if not isinstance(value, int | float):
        raise PluginError(f"{what} must be one number, not {_kind(value)}")
    return float(value)


def _flat(value: Any, masks: Sequence[Tensor], what: str) -> Tensor:
    """Values of all response tokens [sum R], finite where they are trained."""
    import torch

    count = sum(map(len, masks))
    if isinstance(value, list | tuple) and all(isinstance(v, torch.Tensor) for v in value):
        value = torch.cat(list(value)) if value else torch.zeros(0)
    if not isinstance(value, torch.Tensor) or value.shape != (count,):
        raise PluginError(
            f"{what}: one number for each of the {count} response tokens of {len(masks)} samples "
            f"is needed, not {_kind(value)}"
        )
    trained = torch.cat(list(masks)).to(value.device) != 0
    wrong = trained & ~torch.isfinite(value.detach())
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise PluginError(f"{what}: {value[at].item()} at a trained token (response token {at})")
    return value


def _columns(value: Any, masks: Sequence[Tensor], what: str) -> list[Tensor]:
    """Values of each sample's response tokens, one tensor [R] each."""
    lengths = [len(mask) for mask in masks]
    if isinstance(value, list | tuple):
        shapes = [tuple(getattr(one, "shape", ("no tensor",))) for one in value]
        if shapes != [(n,) for n in lengths]:
            raise PluginError(
                f"{what}: a list of tensors of {lengths} numbers, one a sample, is needed, not of "
                f"{[shape[0] if len(shape) == 1 else shape for shape in shapes]}"
            )
    return list(_flat(value, masks, what).split(lengths))


def _metrics(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise PluginError(f"{what}: the metrics must be a dict, not {_kind(value)}")
    return {str(name): number for name, number in value.items()}


def _kind(value: Any) -> str:
    """What something is, in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}{size}"
