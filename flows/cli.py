"""The `sluice` command: what a user types, and nothing else. The work is in the modules it calls.

Exit codes: 0 done, 1 the run failed, 2 bad input, 3 interrupted and resumable.
Imports are inside the commands, so that `sluice --help` answers at once.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter, validators

from flows.exit_codes import BAD_INPUT, DONE, FAILED, INTERRUPTED
from rlcore import __version__
from rlcore.errors import ConfigError, DataError, NotFound, PluginError, SluiceError

app = App(
    name="sluice",
    version=__version__,
    help="Train language models by reinforcement learning; kill it anywhere, lose nothing.",
)
config_app = App(name="config", help="Look at the configuration.")
app.command(config_app)

Sets = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set", negative="", help="A setting as section.key=value; may be given again."
    ),
]
Root = Annotated[
    str | None,
    Parameter(help="Folder or URL of all runs. Default: $SLUICE_ROOT, else ./sluice-data."),
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")]
EvalSets = Annotated[
    tuple[str, ...],
    Parameter(
        consume_multiple=True,
        negative="",
        help="Evaluate on these instead: NAME PATH, and more pairs.",
    ),
]
RunName = Annotated[str, Parameter(help="Name of the run.")]


@app.command
def train(
    config: Annotated[Path, Parameter(help="TOML file of the run.")],
    *,
    set: Sets = (),
    root: Root = None,
    run_id: Annotated[
        str | None, Parameter(help="Name of the run. Default: made from the time.")
    ] = None,
    eval_prompt_data: EvalSets = (),
    json: Json = False,
) -> int:
    """Start a run, or go on with the one of the same name and configuration."""
    from flows.commands.launch import run_training
    from rlcore.config import load_config
    from rlcore.config.load import with_eval_sets

    # Quoted: a name such as 42 or 2026-01-01 is text all the same.
    more = [f"run.id='{run_id}'"] if run_id is not None else []
    base = load_config(config, [*set, *more])
    if eval_prompt_data:
        base = with_eval_sets(base, eval_prompt_data)
    return run_training(base, root=root or os.environ.get("SLUICE_ROOT"), as_json=json)


@app.command
def resume(run: RunName, *, set: Sets = (), root: Root = None, json: Json = False) -> int:
    """Go on with a run from the first stage that is not committed."""
    from flows.commands.launch import run_training
    from rlcore.config import with_sets
    from rlcore.opening import existing_config

    where = root_of(root)
    config = existing_config(where, run)
    return run_training(with_sets(config, set) if set else config, root=where, as_json=json)


@app.command
def runs(*, root: Root = None, json: Json = False) -> None:
    """List the runs of a root."""
    from flows.commands.inspect import list_runs

    list_runs(root_of(root), as_json=json)


@app.command
def show(
    run: RunName,
    *,
    iter: Annotated[
        int | None, Parameter(help="One iteration: its stages, files and metrics.")
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show a run, or one of its iterations."""
    from flows.commands.inspect import show_iteration, show_run

    if iter is None:
        show_run(root_of(root), run, as_json=json)
    else:
        show_iteration(root_of(root), run, iter, as_json=json)


@app.command
def samples(
    run: RunName,
    *,
    iter: Annotated[int, Parameter(help="The iteration.")],
    limit: Annotated[
        int, Parameter(help="How many samples.", validator=validators.Number(gte=1))
    ] = 10,
    root: Root = None,
    json: Json = False,
) -> None:
    """Read the prompts, responses and rewards of an iteration."""
    from flows.commands.inspect import show_samples

    show_samples(root_of(root), run, iter, limit=limit, as_json=json)


@app.command
def verify(run: RunName, *, root: Root = None, json: Json = False) -> int:
    """Check every digest, that each prompt was trained on once and in order, and the chain of
    states.
    """
    from flows.commands.inspect import verify_run_command

    return DONE if verify_run_command(root_of(root), run, as_json=json) else FAILED


@app.command
def sql(
    query: Annotated[
        str, Parameter(help="A SELECT over the views samples, iterations and stages.")
    ],
    *,
    root: Root = None,
    json: Json = False,
) -> None:
    """Ask all runs of a root by SQL (DuckDB)."""
    from flows.commands.inspect import run_sql

    run_sql(root_of(root), query, as_json=json)


@app.command
def fork(
    run: RunName,
    *,
    iter: Annotated[int, Parameter(help="The last iteration that is shared.")],
    as_: Annotated[str, Parameter(name="--as", help="Name of the new run.")],
    set: Sets = (),
    root: Root = None,
    json: Json = False,
) -> int:
    """Make a run that goes on after an iteration of another, sharing all until then."""
    from flows.commands.branch import fork as make

    return make(root_of(root), run, iter, as_, set, as_json=json)


@app.command
def rerun(
    run: RunName,
    *,
    iter: Annotated[int, Parameter(help="The iteration.")],
    stage: Annotated[str, Parameter(help="train or reward.")],
    as_: Annotated[str, Parameter(name="--as", help="Name of the new run.")],
    reward: Annotated[
        str | None, Parameter(help="A reward function, as file.py:function, for --stage reward.")
    ] = None,
    set: Sets = (),
    root: Root = None,
    json: Json = False,
) -> int:
    """Run one stage of an iteration again, from what is stored, and show what changes."""
    from flows.commands.branch import rerun as again

    return again(root_of(root), run, iter, stage, as_, set, reward=reward, as_json=json)


@app.command
def lab(
    run: RunName,
    *,
    iter: Annotated[int, Parameter(help="The iteration whose batch it is.")],
    policy: Annotated[
        int | None,
        Parameter(
            help="The iteration whose trainer state is the policy, -1: the starting model. "
            "Default: the same, else the one before, else the next that is kept."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Compare all estimators and losses on one stored batch."""
    from flows.commands.lab import lab as measure

    measure(root_of(root), run, iter, policy, as_json=json)


@app.command
def evaluate(
    run: RunName,
    *,
    iter: Annotated[
        int | None,
        Parameter(help="The iteration whose checkpoint it is. Default: the newest that is kept."),
    ] = None,
    eval_prompt_data: EvalSets = (),
    root: Root = None,
    json: Json = False,
) -> None:
    """Evaluate a checkpoint on held-out data, beside the run."""
    from flows.commands.evaluate import evaluate as measure

    measure(root_of(root), run, iter, eval_prompt_data, as_json=json)


@app.command
def convert(
    source: Annotated[
        str,
        Parameter(help="Hugging Face folder, Megatron checkpoint (torch_dist), or name of a run."),
    ],
    target: Annotated[Path, Parameter(help="Folder to write, which must not exist.")],
    *,
    model: Annotated[
        Path | None,
        Parameter(help="Hugging Face folder with a Megatron checkpoint's config and tokenizer."),
    ] = None,
    iter: Annotated[
        int | None,
        Parameter(help="The run's iteration whose state it is. Default: the newest that is kept."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        Parameter(help="Of weights that are written. Default: as they are stored."),
    ] = None,
    padded_vocab_size: Annotated[
        int | None,
        Parameter(help="Rows of a Megatron checkpoint's embedding. Default: one a token."),
    ] = None,
    quantize: Annotated[
        Literal["fp8"] | None,
        Parameter(help="Write a Hugging Face folder in fp8 blocks, for rollout.hf_checkpoint."),
    ] = None,
    to: Annotated[
        Literal["torch_dist"] | None,
        Parameter(
            help="Write a Megatron checkpoint of a run's state. Default: a Hugging Face one."
        ),
    ] = None,
    root: Root = None,
    json: Json = False,
) -> None:
    """Convert weights: Hugging Face to Megatron, Megatron to Hugging Face, a run's state to either,
    Hugging Face to fp8.
    """
    from flows.commands.convert import convert as write

    write(
        source,
        target,
        model=model,
        iteration=iter,
        dtype=dtype,
        padded_vocab_size=padded_vocab_size,
        quantize=quantize,
        to=to,
        root=root_of(root),
        as_json=json,
    )


@app.command
def plan(
    config: Annotated[Path, Parameter(help="TOML file of a run.")],
    *,
    gpu: Annotated[str, Parameter(help="a100, h100, h200 or b200.")] = "h200",
    tensor_parallel: Annotated[int | None, Parameter(help="Ranks that share matrices.")] = None,
    pipeline_parallel: Annotated[int | None, Parameter(help="Stages of layers.")] = None,
    context_parallel: Annotated[int | None, Parameter(help="Ranks that share tokens.")] = None,
    expert_parallel: Annotated[int | None, Parameter(help="Ranks that share experts.")] = None,
    expert_tensor_parallel: Annotated[
        int | None, Parameter(help="Ranks that share matrices of an expert.")
    ] = None,
    sequence_parallel: Annotated[bool | None, Parameter(help="Divide norms, too.")] = None,
    distributed_optimizer: Annotated[
        bool | None, Parameter(help="Divide it over replicas.")
    ] = None,
    recompute: Annotated[
        Literal["selective", "full"] | None, Parameter(help="What backward makes again.")
    ] = None,
    set: Sets = (),
    json: Json = False,
) -> int:
    """Count memory, traffic and time of a run's training, before anything starts.

    A run with train.backend = "megatron" is planned in its own layout. Any of the options of
    parallelism, or of Megatron's optimizer and recomputation, goes over it, and plans a layout of
    Megatron for a run of FSDP2 too.
    """
    from flows.commands.plan import plan as count
    from rlcore.config import load_config

    layout = {
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": pipeline_parallel,
        "context_parallel_size": context_parallel,
        "expert_model_parallel_size": expert_parallel,
        "expert_tensor_parallel_size": expert_tensor_parallel,
        "sequence_parallel": sequence_parallel,
        "use_distributed_optimizer": distributed_optimizer,
        "recompute_granularity": recompute,
    }
    return count(load_config(config, set), gpu, layout, as_json=json)


@app.command(name="log")
def show_log(
    run: Annotated[str | None, Parameter(help="A run, with its iterations.")] = None,
    *,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show how the runs of a root descend from each other."""
    from flows.commands.lineage import log_root, log_run

    if run is None:
        log_root(root_of(root), as_json=json)
    else:
        log_run(root_of(root), run, as_json=json)


@app.command
def diff(
    a: RunName,
    b: Annotated[str, Parameter(help="Name of the other.")],
    *,
    root: Root = None,
    json: Json = False,
) -> None:
    """Show where two runs part, and what differs."""
    from flows.commands.lineage import diff as compare

    compare(root_of(root), a, b, as_json=json)


@app.command
def gc(
    *,
    keep: Annotated[
        int | None,
        Parameter(
            help="Trainer states, and checkpoints, that each run keeps. "
            "Default: its checkpoint.keep_last."
        ),
    ] = None,
    older_than: Annotated[
        float, Parameter(help="Age in days of quarantined manifests that are removed.")
    ] = 7.0,
    run: Annotated[str | None, Parameter(help="Clean this run alone.")] = None,
    all_: Annotated[
        bool, Parameter(name="--all", negative="", help="Remove the whole run that --run names.")
    ] = False,
    yes: Annotated[bool, Parameter(negative="", help="Needed by --all.")] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Only say what would be removed.")
    ] = False,
    root: Root = None,
    json: Json = False,
) -> int:
    """Remove what no run needs: files that nothing names, old states and checkpoints."""
    from flows.commands.garbage import gc as collect

    return collect(
        root_of(root),
        keep=keep,
        older_than_days=older_than,
        run_id=run,
        whole=all_,
        yes=yes,
        dry_run=dry_run,
        as_json=json,
    )


@app.command
def up(
    *,
    root: Root = None,
    database_url: Annotated[
        str | None,
        Parameter(help="postgresql+asyncpg://... for Prefect's server. Default: SQLite."),
    ] = None,
    ray: Annotated[bool, Parameter(help="Start a Ray head that all runs share.")] = True,
) -> int:
    """Start a local stack in the background: Prefect with its page, Ray, a worker, deployments."""
    from flows.commands.stack import up as start_stack

    return start_stack(root_of(root), database_url=database_url, ray=ray)


@app.command
def down(*, root: Root = None) -> int:
    """End the stack that `sluice up` started, and nothing else."""
    from flows.commands.stack import down as end_stack

    return end_stack(root_of(root))


@app.command
def wait(
    run: RunName,
    *,
    timeout: Annotated[float | None, Parameter(help="Seconds after which to give up.")] = None,
    root: Root = None,
    json: Json = False,
) -> int:
    """Wait until a run has ended; the exit code says how."""
    from flows.commands.wait import wait_for_run

    return wait_for_run(root_of(root), run, timeout_s=timeout, as_json=json)


@app.command
def doctor(
    config: Annotated[Path | None, Parameter(help="TOML file of a run to check for.")] = None,
    *,
    root: Root = None,
    json: Json = False,
) -> int:
    """Check what runs need: versions, Prefect, Ray, GPUs, the store."""
    from flows.commands.doctor import doctor as examine

    return examine(root_of(root), config, as_json=json)


@app.command
def check_plugin(
    function: Annotated[str, Parameter(help="module:function or file.py:function.")],
    *,
    kind: Annotated[
        str | None, Parameter(help="reward, batched_reward, filter, generate, build, ...")
    ] = None,
    reward_key: Annotated[str | None, Parameter(help="Key of the reward in a dict.")] = None,
    model: Annotated[
        Path | None, Parameter(help="Model folder for a generate function; default: a tiny one.")
    ] = None,
    slime: Annotated[
        bool, Parameter(help="It is written for slime, as with compat.slime = true.", negative="")
    ] = False,
    json: Json = False,
) -> int:
    """Try a custom function on what its kind meets in a run."""
    from flows.commands.check_plugin import check

    return check(function, kind, reward_key=reward_key, model=model, as_json=json, slime=slime)


@app.command
def slime(
    *arguments: Annotated[
        str,
        Parameter(help="Of slime's train.py, after `--`.", allow_leading_hyphen=True),
    ],
    run: Annotated[bool, Parameter(help="Train with it.", negative="")] = False,
    run_id: Annotated[str | None, Parameter(help="Name of the run.")] = None,
    root: Root = None,
    json: Json = False,
) -> int:
    """Print the configuration that a launch line of slime comes to."""
    from flows.commands.slime import from_slime

    return from_slime(arguments, run=run, root=root, name=run_id, as_json=json)


@config_app.command(name="show")
def config_show(config: Path, *, set: Sets = (), json: Json = False) -> None:
    """Print the configuration that a file and options come to."""
    from flows.commands.inspect import show_config
    from rlcore.config import load_config

    show_config(load_config(config, set), as_json=json)


@config_app.command(name="schema")
def config_schema() -> None:
    """Print the JSON schema of the configuration, as Prefect's form uses it."""
    from flows.commands.inspect import show_schema

    show_schema()


def root_of(root: str | None) -> str:
    """The root that a command works on: the option, the environment, or ./sluice-data."""
    where = root or os.environ.get("SLUICE_ROOT") or "sluice-data"
    return where if "://" in where else str(Path(where).expanduser().resolve())


def main() -> None:
    """Entry point of the `sluice` command."""
    try:
        code = app(result_action="return_value", exit_on_error=False)
    except CycloptsError:
        code = BAD_INPUT  # cyclopts has printed what is wrong
    except (ConfigError, DataError, PluginError, NotFound) as error:
        print(f"error: {error}", file=sys.stderr)
        code = BAD_INPUT
    except SluiceError as error:
        print(f"error: {error}", file=sys.stderr)
        code = FAILED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DONE
    sys.exit(code if isinstance(code, int) else DONE)


if __name__ == "__main__":
    main()
