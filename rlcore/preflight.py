"""Everything that can be found wrong before a run starts, found before anything is written.

Each check raises an error that names the setting, file or row. The reward function is tried on one
row, since a function that raises or hangs would otherwise be found only after the first rollout.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rlcore.cluster.ray_session import LOCAL, check_head, where_ray_is
from rlcore.config import ModelConfig, RunConfig
from rlcore.data.dataset import OPTIONAL, check_dataset, first_rows, require_columns
from rlcore.data.demonstrations import require_demonstration
from rlcore.data.prompts import Prompt, refuse_mark
from rlcore.engine.options import check_options
from rlcore.errors import (
    ClusterError,
    ConfigError,
    Corrupt,
    Fenced,
    NotFound,
    PluginError,
    RewardError,
    StoreError,
)
from rlcore.images.files import KIND as IMAGE
from rlcore.images.processor import mark_of_images, takes_images
from rlcore.images.text_alone import check_text_alone
from rlcore.models.hf_config import read_hf_config
from rlcore.models.megatron_layout import MegatronLayout, check_layout
from rlcore.models.presets import check_preset
from rlcore.observe.trackers import check_trackers
from rlcore.opening import check_same, open_store
from rlcore.plugins import MEGATRON, TRAINING, Kind, check_signature, load_checked, load_function
from rlcore.rollout import rewards
from rlcore.rollout.filters.rules import BUILT_IN
from rlcore.rollout.hooks import Hooks
from rlcore.rollout.rewards.dispatch import function_name
from rlcore.rollout.sample_hooks import SampleHooks
from rlcore.sample import Sample, Status
from rlcore.slime.compat import state as slime
from rlcore.slime.compat.attributes import slime_args_of
from rlcore.sources import check_sources, sources_of
from rlcore.store.lease import held_by, is_doubtful, is_held, read_lease
from rlcore.stored_runs import check_source
from rlcore.train.megatron.table import NO_LORA, check_table
from rlcore.weights.fp8 import BlockFp8


def preflight(config: RunConfig) -> None:
    """Check a configuration against the world.

    Raises:
        ConfigError, DataError, PluginError: naming what is wrong and what would mend it.
        Fenced: another driver holds the run and is alive.
    """
    check_run(config)
    check_engine(config)
    check_trackers(config)
    check_model(config.model)
    check_megatron(config)
    if config.rollout.hf_checkpoint is not None:
        BlockFp8.of_folder(Path(config.rollout.hf_checkpoint))
    check_images(config)
    if config.run.train_from:
        check_source(open_store(config), config)
        check_writable(config)
        return
    if config.run.mode == "sft":
        info = check_dataset(config.data, look=require_demonstration)
        require_columns(config.data, info.columns, OPTIONAL)
        check_writable(config)
        return
    check_data(config)
    with slime.active(slime_args_of(config)):
        check_plugins(config)
        check_reward(config)
    # Last, since it writes a probe: bad input leaves not even an empty folder.
    check_writable(config)


def check_run(config: RunConfig) -> None:
    """The root can be read, and holds no other run of this name nor one that is driven now.

    A driver takes the lease later, for good; this look spares a second one all that it would start.
    """
    root = config.storage.root
    if root.startswith("memory://"):
        raise ConfigError(
            f"storage.root = {root!r}: memory:// lives in one process, and a run has many; "
            "use a folder or s3://"
        )
    try:
        store = open_store(config)
        record = store.load_run()
    except NotFound:
        return
    except StoreError as error:
        raise ConfigError(f"storage.root = {root!r} cannot be used: {error}") from None
    check_same(config, record)
    check_sources(config.run.id, record.get("sources", {}), sources_of(config))
    try:
        lease = read_lease(store.objects, config.run.id)
    except Corrupt:
        return  # Opening the run makes it anew.
    if lease is not None and is_held(lease) and not is_doubtful(lease):
        raise Fenced(held_by(config.run.id, lease))


def check_writable(config: RunConfig) -> None:
    """The root can be written to, by one driver at a time."""
    try:
        open_store(config).objects.check_writable()
    except StoreError as error:
        raise ConfigError(
            f"storage.root = {config.storage.root!r} cannot be used: {error}"
        ) from None


def check_engine(config: RunConfig) -> None:
    """The engine, if there is one, is installed where it runs beside this process; else a Ray head
    is there. Arguments of a server are ones that it takes, as far as that can be told here.
    """
    try:
        check_head(config.cluster.ray_address)
    except ClusterError as error:
        raise ConfigError(str(error)) from None
    here = where_ray_is(config.cluster.ray_address) == LOCAL
    sglang = config.generates and config.rollout.engine == "sglang"
    if here and sglang and find_spec("sglang") is None:
        raise ConfigError(
            "rollout.engine = 'sglang', but sglang is not installed here; install the extra `gpu`, "
            "or use 'embedded'"
        )
    if sglang:
        check_options(config.sglang)


def check_model(model: ModelConfig) -> None:
    """The model folder is one, of the named preset, or the function that builds it loads."""
    if model.build:
        load_checked(model.build, "model.build", "build")
        return
    folder = Path(model.path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.path = {model.path!r} is not a folder; download or convert the model first"
        )
    config = folder / "config.json"
    if not config.exists():
        raise ConfigError(
            f"model.path = {model.path!r} holds no config.json; it must be a Hugging Face folder"
        )
    try:
        told = json.loads(config.read_text())
    except ValueError as error:
        raise ConfigError(f"{config} is not valid JSON: {error}") from None
    if told.get("quantization_config"):
        raise ConfigError(
            f"model.path = {model.path!r} holds quantised weights (its config.json has a "
            "quantization_config), which are not trained: give the model as it was before; a "
            "folder in fp8 blocks is what rollout.hf_checkpoint takes"
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.path = {model.path!r} holds no *.safetensors file; "
            "convert its weights to that format"
        )
    if model.preset:
        check_preset(model.preset, folder)


def check_megatron(config: RunConfig) -> None:
    """Settings of the Megatron backend are ones that it takes, and the ranks can be laid out."""
    if config.train.backend != "megatron" or not config.trains:
        return
    check_table(config.megatron)
    if config.model.lora_rank:
        raise ConfigError(NO_LORA)
    folder = Path(config.model.path) if config.model.path else None
    if folder is not None:
        layout = MegatronLayout.of(config.megatron)
        check_layout(read_hf_config(folder), layout, config.world_size)


def check_images(config: RunConfig) -> None:
    """Where rows have images, the model takes them, and so does whatever scores the samples."""
    sets = (config.data, *(one.data(config.data) for one in config.eval.datasets))
    if not any(IMAGE in one.multimodal_keys for one in sets):
        return
    if config.model.path and not takes_images(config.model.path):
        raise ConfigError(
            f"data.multimodal_keys names images, but model.path = {config.model.path!r} takes none "
            "(its config.json has no vision_config)"
        )
    if IMAGE in config.data.multimodal_keys:
        check_text_alone(config, "data.multimodal_keys names images")


def check_data(config: RunConfig) -> None:
    """Every row of every data set can be read and has the columns that are named."""
    look = _look(config)
    require_columns(config.data, check_dataset(config.data, look=look).columns, OPTIONAL)
    for held_out in config.eval.datasets:
        # What it does not say itself may be about columns of the training data alone.
        own = [name for name in OPTIONAL if getattr(held_out, name, None) is not None]
        data = held_out.data(config.data)
        require_columns(data, check_dataset(data, evaluation=True, look=look).columns, own)


def _look(config: RunConfig) -> Callable[[Prompt, str], None] | None:
    """What is looked for in the prompts of a model that sees images."""
    folder = config.model.path
    mark = mark_of_images(folder, config.model.tokenizer or folder) if folder else None
    return None if mark is None else lambda prompt, path: refuse_mark(prompt, path, mark)


def check_plugins(config: RunConfig) -> None:
    """Custom functions load and take what they will be given."""
    generate = config.rollout.custom_generate_function_path
    if generate:
        setting = "rollout.custom_generate_function_path"
        kind: Kind = "group_generate" if config.rollout.group_generate else "generate"
        check_signature(load_function(generate, setting), kind, setting)
    for held_out in config.eval.datasets:
        if held_out.custom_generate_function_path:
            setting = f"custom_generate_function_path of eval.datasets {held_out.name!r}"
            load_checked(held_out.custom_generate_function_path, setting, "generate")
        if held_out.custom_rm_path:
            setting = f"custom_rm_path of eval.datasets {held_out.name!r}"
            reward: Kind = "batched_reward" if config.reward.batched else "reward"
            load_checked(held_out.custom_rm_path, setting, reward)
    if config.eval.eval_function_path is not None:
        load_checked(config.eval.eval_function_path, "eval.eval_function_path", "rollout")
    if config.rollout.data_source_path is not None:
        load_checked(config.rollout.data_source_path, "rollout.data_source_path", "data_source")
    Hooks(config.rollout, None)
    SampleHooks(config.rollout.sample_hook_paths)
    for name, kind in TRAINING.items() if config.trains else ():
        if (path := getattr(config.algorithm, name)) is not None:
            load_checked(path, f"algorithm.{name}", kind)
    for name, kind in MEGATRON.items() if config.trains else ():
        if (path := getattr(config.train, name)) is not None:
            load_checked(path, f"train.{name}", kind)
    if (path := config.weights.custom_update_weight_post_write_path) is not None:
        load_checked(path, "weights.custom_update_weight_post_write_path", "post_write")
    chosen = config.filter.dynamic_sampling_filter_path
    if chosen and chosen not in BUILT_IN:
        setting = "filter.dynamic_sampling_filter_path"
        check_signature(load_function(chosen, setting), "filter", setting)


def check_reward(config: RunConfig) -> None:
    """The reward function loads, and gives a number for an empty answer to the first prompt.

    No trial where a custom function generates or a hook follows, since the reward may need what
    that puts into a sample, nor where some samples may fail.
    """
    rollout = config.rollout
    own = rollout.custom_generate_function_path or rollout.custom_rollout_function_path
    hooked = config.data.generate_function_key or rollout.sample_hook_paths
    if own or hooked or config.reward.max_failed:
        rewards.check_reward(config.reward)
        return
    row = first_rows(config.data, 1)[0]
    sample = Sample(
        group_index=0,
        index=0,
        prompt_id=row.prompt_id,
        prompt=row.prompt,
        label=row.label,
        metadata=row.metadata,
        multimodal_inputs=row.media,
        custom_rm_path=row.custom_rm_path,
        status=Status.COMPLETED,
    )
    sections = [config.reward]
    if config.eval.reward_key and any(not one.custom_rm_path for one in config.eval.datasets):
        sections.append(config.reward.model_copy(update={"reward_key": config.eval.reward_key}))
    for section, setting in zip(sections, ("", " with eval.reward_key"), strict=False):
        try:
            rewards.try_reward(section, sample)
        except RewardError as error:
            name = function_name(config.reward.custom_rm_path, config.reward.rm_type)
            raise PluginError(
                f"{name} failed its trial{setting} on an empty response to the first prompt: "
                f"{error}"
            ) from None
