"""What the rollout worker is made with, what it loads of it, and what it says of a stage."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rlcore.config.tree import (
    DataConfig,
    EvalConfig,
    FilterConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    Scalar,
)
from rlcore.data import Dataset, load_dataset
from rlcore.data.tokenizer import load_tokenizer
from rlcore.images.processor import ImageProcessor, own_template
from rlcore.rollout.demonstrate import raw
from rlcore.rollout.evaluate import EvalSet
from rlcore.rollout.limits import Limits
from rlcore.store.manifest import FileRef


@dataclass(frozen=True)
class RolloutPlan:
    """What the actor is made with: plain values and config sections, nothing of the driver's
    process.

    Attributes:
        run_id: names the folder of the parts.
        seed: of the run.
        root: the store.
        options: of the store.
        model_folder: local folder of the starting model, for limits and tokenizer.
        num_gpus: of all engines, for the metrics.
        slime: slime's `args`, where plugins written for it are to run.
        supervised: rows are learned as they are: nothing is generated, scored or filtered.
        keep_on_for: generation goes on from one rollout to the next, for so many iterations of the
            run; None: each rollout is made on its own.
        adapters: engines hold the starting model, and policies are adapters of it.
        log_dir: for the output of a router.
    """

    run_id: str
    seed: int
    root: str
    options: dict[str, Scalar] = field(repr=False)
    model_folder: str
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    filter: FilterConfig
    eval: EvalConfig
    num_gpus: int = 1
    slime: dict[str, Any] | None = None
    supervised: bool = False
    keep_on_for: int | None = None
    adapters: bool = False
    log_dir: str = "."


@dataclass(frozen=True)
class StageReport:
    """What a stage's work gave, for the driver to commit.

    Attributes:
        files: the parts written.
        metrics: figures by name.
        compute_seconds: in which engines generated.
        timings: seconds of the stage's parts, by name.
        cursor: of a rollout.
        prompts: of a rollout or an evaluation.
        extra: more for the manifest, as JSON.
    """

    files: list[FileRef]
    metrics: dict[str, float]
    compute_seconds: float = 0.0
    timings: dict[str, float] = field(default_factory=dict)
    cursor: dict[str, int] | None = None
    prompts: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """Tokenizer and data of a plan."""

    tokenizer: Any
    dataset: Dataset
    eval_sets: list[EvalSet]
    limits: Limits


def load(plan: RolloutPlan) -> Loaded:
    """Tokenizer, data and limits of a plan.

    Raises:
        ConfigError, DataError: the model folder has no tokenizer, or the data cannot be read.
    """
    # Imported here for the first time, lest the first rollout's write wait for pyarrow.
    import rlcore.store.batch  # noqa: F401

    tokenizer = load_tokenizer(
        plan.model.tokenizer or plan.model_folder, plan.model.trust_remote_code
    )
    if plan.data.multimodal_keys and (template := own_template(plan.model_folder)):
        tokenizer.chat_template = template

    @cache
    def images() -> ImageProcessor:
        return ImageProcessor(plan.model_folder, trust_remote_code=plan.model.trust_remote_code)

    eval_sets = []
    for held_out in [] if plan.supervised else plan.eval.datasets:
        own = held_out.data(plan.data)
        found = load_dataset(own, lambda: tokenizer, evaluation=True, get_images=images)
        eval_sets.append(EvalSet(held_out, found))
    data = raw(plan.data) if plan.supervised else plan.data
    return Loaded(
        tokenizer=tokenizer,
        dataset=load_dataset(data, lambda: tokenizer, get_images=images),
        eval_sets=eval_sets,
        limits=Limits.of_model(plan.model_folder, plan.rollout.context_length),
    )
