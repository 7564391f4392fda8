"""Settings that papers use together, for `extends = "preset:NAME"` in a run's file.

What the file itself says goes over them, and `sluice config show` prints what that comes to. A
preset is read once: a run stores its settings, so a later version's presets do not change it.
"""

from typing import Any

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    # arXiv 2503.14476, sections 3 and 4.1.
    "dapo": {
        "algorithm": {
            "advantage_estimator": "grpo",
            "grpo_std_normalization": True,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "loss_aggregation": "token_mean",
            "use_kl_loss": False,
        },
        "filter": {"dynamic_sampling_filter_path": "nonzero_std"},
    },
    # arXiv 2503.20783, section 3.2.
    "dr_grpo": {
        "algorithm": {
            "advantage_estimator": "grpo",
            "grpo_std_normalization": False,
            "loss_aggregation": "constant",
            "use_kl_loss": False,
        },
    },
    # arXiv 2507.18071, section 5.1.
    "gspo": {
        "algorithm": {
            "advantage_estimator": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss_aggregation": "sequence_mean",
            "use_kl_loss": False,
        },
    },
}
"""By name: sections with their settings. `dr_grpo` leaves algorithm.loss_divisor to the run."""
