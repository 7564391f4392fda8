"""All runs of a root as SQL: views over the committed Parquet files and manifests.

Views:
- `samples`: one row a sample of every committed rollout: run_id, iteration, row, all columns of the
  SAMPLES schema, with `status` and `reward` as scored, `keep` and `reason` as filtered, and
  `details` and `error` of the scorer.
- `iterations`: one row a committed iteration: run_id, iteration, epoch, created, seconds, and a
  column for each metric that any run has, named as the metric.
- `stages`: one row a stage of them: run_id, iteration, stage, seconds, bytes, rows, files, epoch,
  policy_version, attempt, created, sha256.

Invariants:
- Only what is committed shows. Nothing is copied: `samples` reads the files when it is queried.
- Files are found through manifests, never by listing folders.
- What a fork shares with its parent shows once, under the parent.
- A run that cannot be read is left out, with a warning that names it, and hides no other run.
"""

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import duckdb
import pyarrow as pa
from pydantic import ValidationError

from rlcore.errors import Corrupt, StoreError
from rlcore.store.manifest import Manifest, StageRef
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore, run_ids
from rlcore.store.schema import LATER, SAMPLES, SCORES, SELECTION

log = logging.getLogger("sluice.sql")

_READERS = 16
_KINDS = {"rollout": SAMPLES, "reward": SCORES, "filter": SELECTION}
# Remote file systems spell the root of a file's name in their own ways; the key is its end.
_KEY_OF_FILE = "regexp_extract(p.filename, '.*(runs/[^/]+/it/.*)$', 1)"
_Stage = tuple[Manifest, StageRef]


def connect(objects: Objects) -> "duckdb.DuckDBPyConnection":
    """A duckdb connection with the views over all runs of a root."""
    connection = duckdb.connect()
    connection.execute("SET enable_progress_bar = false")
    if objects.local_path("x") is None:
        connection.register_filesystem(objects.filesystem)
    records: list[dict[str, Any]] = []
    stages: list[_Stage] = []
    for run_id in run_ids(objects):
        try:
            own = _records(objects, run_id)
            manifests = _stages(objects, own)
            _iterations(own)
        except StoreError as error:
            log.warning("run %s is left out: %s", run_id, error)
            continue
        records += own
        stages += manifests
    connection.register("iterations_rows", _iterations(records))
    connection.execute("CREATE VIEW iterations AS FROM iterations_rows")
    connection.register("stages_rows", _stage_rows(stages))
    connection.execute("CREATE VIEW stages AS FROM stages_rows")
    for stage, schema in _KINDS.items():
        _create_parts(connection, objects, stage, schema, [m for m, _ in stages])
    connection.execute(_SAMPLES_VIEW)
    return connection


def _records(objects: Objects, run_id: str) -> list[dict[str, Any]]:
    store = RunStore(objects, run_id)
    store.load_run()
    last = store.last_committed()
    if last is None:
        return []
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(store.committed, range(store.first_own, last + 1))
        return [record for record in found if record is not None]


def _stages(objects: Objects, records: list[dict[str, Any]]) -> list[_Stage]:
    try:
        refs = [StageRef.model_validate(ref) for r in records for ref in r["stages"].values()]
    except (KeyError, AttributeError, ValidationError) as error:
        raise Corrupt(f"a commit record does not name its stages: {error!r}") from None
    with ThreadPoolExecutor(_READERS) as pool:
        manifests = pool.map(lambda ref: RunStore(objects, ref.run_id).manifest(ref), refs)
        return list(zip(manifests, refs, strict=True))


def _iterations(records: list[dict[str, Any]]) -> pa.Table:
    fixed = {
        "run_id": pa.array([r["run_id"] for r in records], pa.string()),
        "iteration": pa.array([r["iteration"] for r in records], pa.int64()),
        "epoch": pa.array([r["epoch"] for r in records], pa.int64()),
        "created": pa.array([r["created"] for r in records], pa.string()),
    }
    metrics = [{"seconds": None} | record["metrics"] for record in records]
    names = dict.fromkeys(name for row in metrics for name in row if name not in fixed)
    columns = {
        name: pa.array([_number(row.get(name)) for row in metrics], pa.float64())
        for name in ("seconds", *sorted(names.keys() - {"seconds"}))
    }
    return pa.table(fixed | columns)


def _stage_rows(stages: list[_Stage]) -> pa.Table:
    rows = [
        {
            "run_id": manifest.run_id,
            "iteration": manifest.iteration,
            "stage": manifest.stage,
            "seconds": manifest.timings.get("seconds"),
            "bytes": sum(file.bytes for file in manifest.files),
            "rows": ref.rows,
            "files": len(manifest.files),
            "epoch": manifest.epoch,
            "policy_version": manifest.policy_version,
            "attempt": manifest.attempt,
            "created": manifest.created,
            "sha256": ref.sha256,
        }
        for manifest, ref in stages
    ]
    return pa.Table.from_pylist(rows, schema=_STAGE_SCHEMA)


def _create_parts(
    connection: "duckdb.DuckDBPyConnection",
    objects: Objects,
    stage: str,
    schema: pa.Schema,
    manifests: Iterable[Manifest],
) -> None:
    """View `{stage}_parts`: one stage's files of all iterations, with run_id, iteration, row."""
    urls, names, runs, iterations, starts = [], [], [], [], []
    on_disk = objects.local_path("x") is not None
    for manifest in manifests:
        start = 0
        for file in manifest.files if manifest.stage == stage else ():
            urls.append(str(objects.local_path(file.key)) if on_disk else objects.url(file.key))
            names.append(urls[-1] if on_disk else file.key)
            runs.append(manifest.run_id)
            iterations.append(manifest.iteration)
            starts.append(start)
            start += file.rows
    if not urls:
        connection.register(f"{stage}_empty", _empty(schema))
        connection.execute(f"CREATE VIEW {stage}_parts AS FROM {stage}_empty")
        return
    table = pa.table({"name": names, "run_id": runs, "iteration": iterations, "start": starts})
    connection.register(f"{stage}_files", table)
    # Runs of older versions lie beside this one's, and lack what has come since.
    own = ", ".join(f'p."{name}"' for name in schema.names if name not in {"row", *LATER})
    # A re-run names the files of the run that it shares them with: each is read once.
    listed = ", ".join(_quoted(url) for url in dict.fromkeys(urls))
    connection.execute(
        f"CREATE VIEW {stage}_parts AS SELECT f.run_id, f.iteration, "
        f"f.start + p.file_row_number AS row, {own} "
        f"FROM read_parquet([{listed}], filename = true, file_row_number = true) p "
        f"JOIN {stage}_files f ON f.name = {'p.filename' if on_disk else _KEY_OF_FILE}"
    )


def _empty(schema: pa.Schema) -> pa.Table:
    head = [pa.field("run_id", pa.string()), pa.field("iteration", pa.int64())]
    row = pa.field("row", pa.int64())
    rest = [field for field in schema if field.name not in {"row", *LATER}]
    return pa.schema([*head, row, *rest]).empty_table()


def _number(value: Any) -> float | None:
    # Infinities and NaN are texts in JSON.
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        raise StoreError(f"metric value {value!r} of a committed iteration is no number") from None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


_STAGE_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("iteration", pa.int64()),
        ("stage", pa.string()),
        ("seconds", pa.float64()),
        ("bytes", pa.int64()),
        ("rows", pa.int64()),
        ("files", pa.int64()),
        ("epoch", pa.int64()),
        ("policy_version", pa.int64()),
        ("attempt", pa.string()),
        ("created", pa.string()),
        ("sha256", pa.string()),
    ]
)

_HIDDEN = {"status", "reward", *LATER}
_ROLLOUT_COLUMNS = ", ".join(f'r."{n}"' for n in SAMPLES.names if n not in _HIDDEN)
_SAMPLES_VIEW = f"""
CREATE VIEW samples AS
SELECT r.run_id, r.iteration, r.row, {_ROLLOUT_COLUMNS},
       coalesce(s.status, r.status) AS status,
       coalesce(f.reward, s.reward, r.reward) AS reward,
       s.details, s.error, f.keep, f.reason
FROM rollout_parts r
LEFT JOIN reward_parts s USING (run_id, iteration, row)
LEFT JOIN filter_parts f USING (run_id, iteration, row)
"""
