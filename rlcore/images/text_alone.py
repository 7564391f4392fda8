"""Settings that know of text alone, refused where prompts have images: they would see placeholders,
and nothing would say so.
"""

from pathlib import Path

from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.images.processor import takes_images


def check_text_alone(config: RunConfig, what: str) -> None:
    """None of them is set.

    Args:
        config: of a run whose prompts have images.
        what: the setting that says so, for errors.

    Raises:
        ConfigError: naming the setting, and what to use.
    """
    teacher = config.algorithm.opd_teacher_load
    if config.rollout.teacher_url is not None:
        raise ConfigError(
            f"rollout.teacher_url is asked about text alone, but {what}; use a teacher of "
            "algorithm.opd_teacher_load"
        )
    # A folder that is not here is on the trainer's machine.
    if teacher and Path(teacher).is_dir() and not takes_images(teacher):
        raise ConfigError(
            f"algorithm.opd_teacher_load = {teacher!r} takes no images (its config.json has no "
            f"vision_config), but {what}; use a teacher that does"
        )
    if config.algorithm.custom_convert_samples_to_train_data_path is not None:
        raise ConfigError(
            "algorithm.custom_convert_samples_to_train_data_path makes sequences of text alone, "
            f"but {what}; use algorithm.custom_reward_post_process_path, or "
            "rollout.rollout_sample_filter_path to leave samples out"
        )
