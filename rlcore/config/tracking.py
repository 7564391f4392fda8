"""The section `tracking`: where metrics go beside the store and Prefect."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlcore.config.secrets import check_no_login
from rlcore.config.section import FilePath, Section


class TrackingConfig(Section):
    """Where metrics go beside the store and Prefect."""

    tensorboard: bool = False
    """Write TensorBoard's event files."""
    tensorboard_dir: FilePath = ""
    """Folder of their folders, one a run. Empty: `tensorboard` in the run's folder."""
    wandb: bool = False
    """Send metrics to Weights & Biases. Its key is in WANDB_API_KEY, or from `wandb login`."""
    wandb_project: str = ""
    """Project. Empty: `sluice`."""
    wandb_entity: str = ""
    """User or team that the project is of. Empty: the key's own."""
    wandb_group: str = ""
    """Group of runs."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes to `wandb_dir`, for `wandb sync`; default: $WANDB_MODE, else `online`."""
    wandb_dir: FilePath = ""
    """Folder of its files. Empty: `wandb` in the run's folder, or wandb's own choice."""
    wandb_host: str = ""
    """Address of a server of one's own. Empty: $WANDB_BASE_URL, else wandb.ai."""
    wandb_run_id: Annotated[str, Field(pattern=r"^[^/\\#?%:]{0,128}$")] = ""
    """Id of the run there. Empty: made from the run's name and its creation, so resumes go on."""
    mlflow: bool = False
    """Send metrics to MLflow."""
    mlflow_tracking_uri: str = ""
    """Its server, or file:// or sqlite:// address. Empty: $MLFLOW_TRACKING_URI."""
    mlflow_experiment: str = ""
    """Experiment. Empty: `sluice`."""

    @model_validator(mode="after")
    def _settings_have_a_use(self) -> "TrackingConfig":
        for tracker in ("tensorboard", "wandb", "mlflow"):
            for name, field in type(self).model_fields.items():
                about = name.startswith(f"{tracker}_") and getattr(self, name) != field.default
                if about and not getattr(self, tracker):
                    raise ValueError(
                        f"tracking.{name} is set, but tracking.{tracker} = false: set "
                        f"tracking.{tracker} = true, or remove it"
                    )
        check_no_login("tracking.wandb_host", self.wandb_host)
        check_no_login("tracking.mlflow_tracking_uri", self.mlflow_tracking_uri)
        return self
