"""No name that comes from outside leads out of the root: ids, keys, manifests."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import Corrupt, NotFound, StoreError
from rlcore.store import paths
from rlcore.store.manifest import FileRef, Manifest
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

STEPS = st.sampled_from(["..", ".", "", "a", "runs", "~", "%2e%2e", "\\", "C:", "\0", "etc", "..."])
NAMES = st.one_of(
    st.text(max_size=30),
    st.lists(STEPS, min_size=1, max_size=6).map("/".join),
    st.lists(STEPS, min_size=1, max_size=6).map(lambda steps: "/" + "/".join(steps)),
)
ESCAPES = ["../../etc/passwd", "/etc/passwd", "runs/../../x", "a//b", "", "..", "a/./b", "a\\b"]


def manifest_bytes(**changes: object) -> bytes:
    base = {"schema_version": 1, "run_id": "r", "iteration": 0, "stage": "rollout"}
    base |= {"config_digest": "c", "epoch": 1, "attempt": "a"}
    return json.dumps(base | changes).encode()


@given(name=NAMES)
@settings(max_examples=400, deadline=None)
def test_whatever_the_key_it_stays_below_the_root(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    base = tmp_path_factory.getbasetemp() / "keys"
    objects = Objects.open(base / "root")
    base.mkdir(exist_ok=True)
    try:
        path = objects.local_path(name)
    except StoreError:
        return
    assert path is not None
    assert Path(path).resolve().is_relative_to((base / "root").resolve())
    assert objects.url(name).startswith(f"{objects.root}/")


@given(name=NAMES)
@settings(max_examples=400, deadline=None)
def test_whatever_the_run_id_its_folder_is_one_below_runs(name: str) -> None:
    try:
        prefix = paths.run_prefix(name)
    except NotFound:
        return
    assert prefix == f"runs/{name}"
    assert "/" not in name and name not in (".", "..") and name.isprintable()


@given(key=NAMES, rows=st.integers(0, 5))
@settings(max_examples=200, deadline=None)
def test_a_manifest_names_no_file_outside(key: str, rows: int) -> None:
    data = manifest_bytes(files=[{"key": key, "bytes": 1, "rows": rows, "sha256": "0" * 64}])
    try:
        manifest = Manifest.from_bytes(data, "here")
    except Corrupt as error:
        assert "files.0.key" in str(error)
        return
    named = manifest.files[0].key
    assert not named.startswith("/") and not {"..", ".", ""} & set(named.split("/"))


@pytest.mark.parametrize("key", ESCAPES)
def test_a_planted_manifest_counts_as_damaged_and_reads_nothing(tmp_path: Path, key: str) -> None:
    objects = Objects.open(tmp_path / "root")
    file = {"key": key, "bytes": 1, "rows": 0, "sha256": "0" * 64}
    planted = paths.manifest_key("r", 0, "rollout")
    objects.put(planted, manifest_bytes(files=[file]))
    store = RunStore(objects, "r")
    with pytest.raises(Corrupt, match="root"):
        store.stage(0, "rollout")
    assert store.lookup(0, "rollout", {}, "c") is None
    assert not objects.exists(planted)


@pytest.mark.parametrize("prefix", [*ESCAPES, "runs", "runs/r", "runs/r/it", "runs/r/it/000000"])
def test_a_manifest_names_no_folder_whose_removal_would_hurt(prefix: str) -> None:
    data = manifest_bytes(extra={"state": {"key_prefix": prefix, "files": []}})
    with pytest.raises(Corrupt, match=r"root|is not the folder of one execution"):
        Manifest.from_bytes(data, "here")


@pytest.mark.parametrize("key", ESCAPES)
def test_a_reference_from_another_process_names_no_file_outside(key: str) -> None:
    with pytest.raises(ValueError, match="root"):
        FileRef(key=key, bytes=1, sha256="0" * 64)
