"""The reward curve of a run as a picture."""

from pathlib import Path

from rlcore.observe.history import iterations
from rlcore.store.objects import Objects


def draw_curve(root: str, run_id: str) -> Path | str | None:
    """Draw reward and exact match over the iterations into `reward.png` of the run.

    Returns:
        Where the picture lies; None where no iteration is committed, or none has rewards.
    """
    objects = Objects.open(root)
    rows = iterations(objects, run_id)
    if not any("rollout/raw_reward" in row for row in rows):
        return None
    key = f"runs/{run_id}/reward.png"
    objects.put(key, render(run_id, rows))
    return objects.local_path(key) or objects.url(key)


def render(run_id: str, rows: list[dict[str, float]]) -> bytes:
    """The picture's PNG bytes.

    Args:
        run_id: goes into the title.
        rows: an iteration each, with `iteration` and its metrics.
    """
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=130)
    x = [r["iteration"] + 1 for r in rows]
    for name, label, color in (
        ("rollout/raw_reward", "mean reward", "#1f6feb"),
        ("rollout/exact", "reward of 1 or more", "#2da44e"),
    ):
        if any(name in r for r in rows):
            axes.plot(x, [r.get(name, float("nan")) for r in rows], label=label, color=color)
    for name in sorted({k for r in rows for k in r if is_eval_reward(k)}):
        points = [(r["iteration"] + 1, r[name]) for r in rows if name in r]
        label = f"eval {name.removeprefix('eval/')}"
        axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.8, label=label)
    axes.set(xlabel="iteration", ylabel="reward", title=run_id)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png")
    pyplot.close(figure)
    return out.getvalue()


def is_eval_reward(name: str) -> bool:
    """Whether a metric is the mean reward of an evaluation data set: `eval/<data set>`."""
    return name.startswith("eval/") and name.count("/") == 1
