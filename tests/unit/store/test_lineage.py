"""`verify_run`: a whole run passes, and every kind of fault is named."""

import re
import sys
from typing import Any

import pytest

from rlcore.config.digest import tree_digest
from rlcore.data import Order
from rlcore.errors import NotFound
from rlcore.sample import Sample, Status
from rlcore.store import paths
from rlcore.store.batch import (
    SCORES,
    SELECTION,
    read_samples,
    rows_to_table,
    samples_to_table,
    write_table,
)
from rlcore.store.lease import Lease
from rlcore.store.lineage import _PromptOrder, verify_run
from rlcore.store.manifest import (
    FileRef,
    Manifest,
    StageRef,
    canonical_json,
    chain_state_id,
    sha256_hex,
)
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

SIZE, GROUPS, MEMBERS = 5, 2, 3


class Writer:
    """Writes a small run as the stages would. `change` alters what a stage commits."""

    def __init__(self, objects: Objects, change: dict[tuple[int, str], dict[str, Any]]) -> None:
        self.objects = objects
        self.store = RunStore(objects, "r")
        config = {"run": {"seed": 3}, "data": {"shuffle": False}}
        self.store.create_run({"config": config, "config_digest": tree_digest(config)})
        self.lease = Lease.acquire(objects, "r")
        self.change = change
        self.state = "start"
        self.policy: StageRef | None = None

    def commit(self, i: int, stage: str, inputs: dict[str, StageRef], **more: Any) -> StageRef:
        fields = {
            "run_id": "r",
            "iteration": i,
            "stage": stage,
            "config_digest": "c",
            "epoch": self.lease.epoch,
            "attempt": "a",
            "inputs": {name: ref.sha256 for name, ref in inputs.items()},
            "timings": {"seconds": 0.5},
        }
        made = Manifest(**fields | more | self.change.get((i, stage), {}))
        return self.store.commit(made, self.lease)

    def table(self, i: int, stage: str, table: Any) -> FileRef:
        return write_table(
            self.objects, paths.part_key("r", i, stage, 0, paths.new_attempt()), table
        )

    def iteration(self, i: int) -> None:
        places = range(i * GROUPS, (i + 1) * GROUPS)
        made = samples(i, [f"p{place % SIZE}" for place in places])
        start, end = divmod(places[0], SIZE), divmod(places[-1] + 1, SIZE)
        cursor = {"epoch": start[0], "offset": start[1], "size": SIZE}
        cursor |= {"next_epoch": end[0], "next_offset": end[1]}
        part = self.table(i, "rollout", samples_to_table(made))
        policy = {"policy": self.policy} if self.policy else {}
        rollout = self.commit(i, "rollout", policy, files=(part,), cursor=cursor)
        part = self.table(i, "reward", rows_to_table(SCORES, scores(made)))
        reward = self.commit(i, "reward", {"rollout": rollout}, files=(part,))
        part = self.table(i, "filter", rows_to_table(SELECTION, selection(made)))
        both = {"rollout": rollout, "reward": reward}
        chosen = self.commit(i, "filter", both, files=(part,))
        batch = [rollout.sha256, reward.sha256, chosen.sha256]
        state = chain_state_id(self.state, batch, "c")
        extra = {"prev_state_id": self.state, "state_id": state, "state": self.saved(i)}
        # Of six samples one failed and one was not kept.
        train = self.commit(i, "train", both | {"filter": chosen}, extra=extra | {"samples": 4})
        self.policy = self.commit(i, "weight_sync", {"train": train})
        evaluation = self.commit(i, "evaluate", {"policy": self.policy})
        stages = both | {"filter": chosen, "train": train, "weight_sync": self.policy}
        record = {"stages": stages | {"evaluate": evaluation}, "metrics": {"seconds": 1.0, "m": i}}
        self.store.commit_iteration(i, record, self.lease)
        self.state = state

    def saved(self, i: int) -> dict[str, Any]:
        prefix = paths.state_prefix("r", i, "a")
        self.objects.put(f"{prefix}/model.bin", b"%d" % i)
        file = FileRef(key=f"{prefix}/model.bin", bytes=1, sha256=sha256_hex(b"%d" % i))
        digests = {"model_sha256": "m", "optimizer_sha256": "o"}
        return {"key_prefix": prefix, "files": [file.model_dump()], **digests}


def samples(i: int, prompts: list[str]) -> list[Sample]:
    return [
        Sample(
            group_index=g,
            index=g * MEMBERS + m,
            prompt_id=prompt,
            prompt=[{"role": "user", "content": "7="}] if g else "7=",
            label={"answer": "777"},
            tokens=[1, 2, 3],
            response="777",
            response_length=2,
            rollout_log_probs=[-1.0, -2.0],
            status=Status.COMPLETED,
            weight_versions=[str(i)],
        )
        for g, prompt in enumerate(prompts)
        for m in range(MEMBERS)
    ]


def scores(made: list[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "row": row,
            "prompt_id": s.prompt_id,
            "group_index": s.group_index,
            "index": s.index,
            "reward": None if row == 1 else row / 2,
            "status": "failed" if row == 1 else "completed",
            "details": '{"exact":1}' if row == 0 else None,
            "error": "it raised" if row == 1 else None,
        }
        for row, s in enumerate(made)
    ]


def selection(made: list[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "row": row,
            "group_index": s.group_index,
            "index": s.index,
            "reward": None if row == 1 else row / 2,
            "keep": row != 4,
            "reason": "too long" if row == 4 else None,
        }
        for row, s in enumerate(made)
    ]


def write_run(
    objects: Objects, count: int = 4, change: dict[tuple[int, str], dict[str, Any]] | None = None
) -> Writer:
    writer = Writer(objects, change or {})
    for i in range(count):
        writer.iteration(i)
    return writer


def test_a_whole_run_passes(objects: Objects) -> None:
    write_run(objects)
    report = verify_run(objects, "r")
    assert report.errors == [] and report.ok
    assert report.counts == {
        "iterations": 4,
        "manifests": 24,
        "files": 16,
        "bytes": report.counts["bytes"],
        "prompts": 8,
        "samples": 24,
        "trained": 16,
        "states_saved": 4,
        "states_pruned": 0,
        "quarantined": 0,
    }
    assert report.counts["bytes"] > 10_000


def test_a_run_in_the_middle_of_an_iteration_passes(disk: Objects) -> None:
    write_run(disk, 2)
    disk.delete(paths.committed_key("r", 1))
    report = verify_run(disk, "r")
    assert report.ok and report.counts["iterations"] == 1 and report.counts["manifests"] == 12


def test_a_pruned_state_is_no_fault(disk: Objects) -> None:
    write_run(disk, 2)
    prefix = paths.state_prefix("r", 0, "a")
    disk.put(paths.pruned_key(prefix), b"{}")
    disk.delete(f"{prefix}/model.bin")
    report = verify_run(disk, "r")
    assert report.ok
    assert (report.counts["states_saved"], report.counts["states_pruned"]) == (1, 1)


def test_an_unknown_run_is_not_found(disk: Objects) -> None:
    with pytest.raises(NotFound, match="run nope"):
        verify_run(disk, "nope")


CURSOR = {"epoch": 0, "offset": 2, "next_epoch": 0, "next_offset": 4, "size": SIZE}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({(1, "rollout"): {"cursor": CURSOR | {"offset": 3}}}, "begins at epoch 0, offset 3"),
        ({(1, "rollout"): {"cursor": CURSOR | {"next_offset": 3}}}, "moved by 1 prompts, .* has 2"),
        ({(1, "rollout"): {"cursor": CURSOR | {"size": 6}}}, "has 6 rows, before it had 5"),
        ({(1, "rollout"): {"cursor": None}}, "has no cursor"),
        ({(1, "rollout"): {"inputs": {}}}, "does not name the policy"),
        ({(1, "rollout"): {"inputs": {"policy": "0" * 64}}}, "made from policy 000000000000, but"),
        ({(1, "reward"): {"inputs": {"rollout": "0" * 64}}}, "made from rollout 000000000000, but"),
        ({(1, "train"): {"inputs": {"nothing": "0" * 64}}}, "of which there is no manifest"),
        ({(1, "train"): {"extra": {}}}, "says nothing of prev_state_id, samples, state, state_id"),
        ({(1, "train"): {"config_digest": "d"}}, "does not follow"),
        ({(0, "evaluate"): {"epoch": 5}}, "committed under epoch 1, after a stage of epoch 5"),
    ],
)
def test_every_fault_is_named(
    disk: Objects, change: dict[tuple[int, str], dict[str, Any]], fault: str
) -> None:
    write_run(disk, 3, change)
    report = verify_run(disk, "r")
    assert not report.ok
    assert any(_matches(fault, error) for error in report.errors), report.errors
    assert all(error.startswith("iteration ") for error in report.errors)


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def test_a_broken_chain_of_states_is_named(disk: Objects) -> None:
    writer = write_run(disk, 1)
    writer.state = "f" * 64
    writer.iteration(1)
    assert any("began with state ffffffffffff" in e for e in verify_run(disk, "r").errors)


def test_a_miscount_of_trained_samples_is_named(disk: Objects) -> None:
    good = write_run(disk, 1).store.stage(0, "train")
    assert good
    other = Objects.open(f"{disk.root}-other")
    write_run(other, 1, {(0, "train"): {"extra": good[0].extra | {"samples": 5}}})
    assert any("5 samples were trained on, but 4" in e for e in verify_run(other, "r").errors)


def test_a_repeated_prompt_is_named(disk: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    real = samples

    def repeat(i: int, prompts: list[str]) -> list[Sample]:
        return real(i, ["p1", "p3"] if i == 1 else prompts)

    monkeypatch.setitem(Writer.iteration.__globals__, "samples", repeat)
    write_run(disk, 2)
    errors = verify_run(disk, "r").errors
    assert any("p1 was used twice in epoch 0" in e for e in errors)
    assert any("data plan has row 2 at epoch 0, offset 2" in e for e in errors)


@pytest.mark.parametrize(
    "key", ["it/000001/rollout/_MANIFEST.json", "it/000000/train/state-a/model.bin"]
)
def test_altered_bytes_are_named(disk: Objects, key: str) -> None:
    write_run(disk, 2)
    data = disk.get(f"runs/r/{key}")
    disk.put(f"runs/r/{key}", data.replace(b"1", b"2").replace(b"0", b"1"))
    errors = verify_run(disk, "r").errors
    assert any(key in e and "sha256" in e for e in errors), errors


def test_a_starting_model_that_was_altered_is_named(disk: Objects) -> None:
    write_run(disk)
    key = f"{paths.model_prefix('r')}/config.json"
    disk.put(key, b"{}")
    ref = FileRef(key=key, bytes=2, sha256=sha256_hex(b"{}"))
    disk.put(paths.model_listing_key("r"), canonical_json([ref.model_dump()]))
    assert verify_run(disk, "r").ok
    disk.put(key, b"[]")
    [error] = verify_run(disk, "r").errors
    assert error.startswith("starting model: ") and "config.json" in error


def test_a_missing_part_is_named(disk: Objects) -> None:
    found = write_run(disk, 2).store.stage(0, "reward")
    assert found
    disk.delete(found[0].files[0].key)
    errors = verify_run(disk, "r").errors
    assert any(found[0].files[0].key in e and "is missing" in e for e in errors)


@pytest.mark.parametrize(("count", "gone"), [(4, 1), (4, 0), (7, 2)])
def test_a_gap_is_named(disk: Objects, count: int, gone: int) -> None:
    write_run(disk, count)
    disk.delete(paths.committed_key("r", gone))
    assert any(
        error.startswith(f"iteration {gone}: it is not committed, but")
        for error in verify_run(disk, "r").errors
    )


def test_samples_as_people_see_them(disk: Objects) -> None:
    writer = write_run(disk, 1)
    found = [writer.store.stage(0, name) for name in ("rollout", "reward", "filter")]
    manifests = {pair[0].stage: pair[0] for pair in found if pair}
    rows = read_samples(disk, manifests)
    assert [row["row"] for row in rows] == list(range(6))
    assert rows[0]["prompt"] == "7=" and rows[3]["prompt"] == [{"role": "user", "content": "7="}]
    assert rows[0]["label"] == {"answer": "777"} and rows[0]["reward_details"] == {"exact": 1}
    assert (rows[1]["status"], rows[1]["reward"], rows[1]["error"]) == ("failed", None, "it raised")
    assert (rows[4]["keep"], rows[4]["reason"], rows[4]["reward"]) == (False, "too long", 2.0)
    assert len(read_samples(disk, manifests, 2)) == 2
    only = read_samples(disk, {"rollout": manifests["rollout"]}, 1)
    assert only[0]["keep"] and only[0]["reward"] is None and only[0]["response"] == "777"


# --- what a rollout leaves to the next one --------------------------------------------------------

Place = tuple[int, int]

# Three prompts are begun at a time, two are used: (places used, places left).
STORY: list[tuple[list[Place], list[Place]]] = [
    ([(0, 0), (0, 2)], [(0, 1)]),
    ([(0, 1), (0, 3)], [(0, 4)]),
    ([(0, 4), (1, 1)], [(1, 0)]),
    ([(1, 0), (1, 2)], [(1, 3)]),
]
ENDS = [(0, 3), (1, 0), (1, 2), (1, 4)]


def prompt_at(place: Place) -> str:
    return f"p{place[1]}"


def left_over(objects: Objects, i: int, places: list[Place]) -> dict[str, Any]:
    """A buffer as a rollout records it: of each group a whole, a cut and a pending sample."""
    made = samples(i, [prompt_at(place) for place in places])
    for k, sample in enumerate(made):
        sample.status = (Status.COMPLETED, Status.ABORTED, Status.PENDING)[k % MEMBERS]
    prefix = paths.buffer_prefix("r", i, "a")
    ref = write_table(objects, f"{prefix}/part-00000.parquet", samples_to_table(made))
    return {
        "key_prefix": prefix,
        "files": [ref.model_dump(mode="json")],
        "places": [list(place) for place in places],
    }


def write_story(
    objects: Objects,
    monkeypatch: pytest.MonkeyPatch,
    story: list[tuple[list[Place], list[Place]]] = STORY,
    change: dict[int, dict[str, Any]] | None = None,
    more: dict[int, dict[str, Any]] | None = None,
) -> Writer:
    changes: dict[tuple[int, str], dict[str, Any]] = {}
    for i, (_, left) in enumerate(story):
        start, end = (ENDS[i - 1] if i else (0, 0)), ENDS[i]
        cursor = {"epoch": start[0], "offset": start[1], "size": SIZE}
        cursor |= {"next_epoch": end[0], "next_offset": end[1]}
        extra = {"buffer": left_over(objects, i, left) | (change or {}).get(i, {})}
        extra |= (more or {}).get(i, {})
        changes[i, "rollout"] = {"cursor": cursor, "extra": extra}

    real = samples

    def used(i: int, _: list[str]) -> list[Sample]:
        return real(i, [prompt_at(place) for place in story[i][0]])

    monkeypatch.setitem(Writer.iteration.__globals__, "samples", used)
    writer = Writer(objects, changes)
    for i in range(len(story)):
        writer.iteration(i)
    return writer


def faults(objects: Objects) -> str:
    return "\n".join(verify_run(objects, "r").errors)


def test_a_run_with_buffers_is_whole(disk: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    write_story(disk, monkeypatch)
    report = verify_run(disk, "r")
    assert report.errors == []
    # Four iterations of three parts, a state and a buffer.
    assert (report.counts["prompts"], report.counts["files"]) == (8, 20)


@pytest.mark.parametrize(
    ("i", "used", "left", "fault"),
    [
        # Used, though the buffer still holds it.
        (1, [(0, 3), (0, 4)], [(0, 1), (0, 4)], "the buffer had 1 before and has 2 now"),
        # Given up: in no rollout and in no buffer.
        (1, [(0, 3), (0, 4)], [], "the buffer had 1 before and has 0 now"),
        # Used in the iteration before, and come back.
        (1, [(0, 1), (0, 3)], [(0, 0), (0, 4)], "epoch 0, offset 0, which was not in the buffer"),
        # Another prompt than the one that the buffer had.
        (1, [(0, 2), (0, 3)], [(0, 4)], "prompt p2 was used twice in epoch 0"),
        # Out of order.
        (1, [(0, 3), (0, 1)], [(0, 4)], "the data plan has row 1"),
    ],
)
def test_a_prompt_that_is_lost_or_comes_twice_is_named(
    disk: Objects,
    monkeypatch: pytest.MonkeyPatch,
    i: int,
    used: list[Place],
    left: list[Place],
    fault: str,
) -> None:
    story = [*STORY[:i], (used, left), *STORY[i + 1 :]]
    write_story(disk, monkeypatch, story)
    assert fault in faults(disk)


@pytest.mark.parametrize(
    ("dropped", "fault"),
    [
        ([(0, 3)], ""),
        ([], "but the rollout has 2"),
        ([(0, 2), (0, 3)], "epoch 0, offset 2 was dropped, but it was not begun"),
        ([(0, 3), (1, 0)], "epoch 1, offset 0 was dropped, but it was not begun, or is in the buf"),
    ],
)
def test_dropped_prompts_are_accounted_for(
    disk: Objects, monkeypatch: pytest.MonkeyPatch, dropped: list[Place], fault: str
) -> None:
    # The second rollout dropped (0, 3) and began (1, 0) in its place.
    monkeypatch.setattr(sys.modules[__name__], "ENDS", [(0, 3), (1, 1), (1, 3), (2, 0)])
    story = [
        STORY[0],
        ([(0, 1), (0, 4)], [(1, 0)]),
        ([(1, 0), (1, 1)], [(1, 2)]),
        ([(1, 2), (1, 3)], [(1, 4)]),
    ]
    more = {1: {"dropped": left_over(disk, 9, dropped)}} if dropped else {}
    write_story(disk, monkeypatch, story, more=more)
    found = faults(disk)
    assert fault in found if fault else not found


def test_a_buffer_that_is_not_what_its_record_says_is_named(
    disk: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_story(disk, monkeypatch, change={2: {"places": [[1, 0], [1, 1]]}})
    assert "the buffer holds 1 prompts, but not at as many places" in faults(disk)


def test_a_damaged_buffer_is_named_and_its_rollout_is_done_again(
    disk: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write_story(disk, monkeypatch)
    key = f"{paths.buffer_prefix('r', 3, 'a')}/part-00000.parquet"
    disk.put(key, disk.get(key)[:-1] + b"x")
    assert key in faults(disk)
    disk.delete(paths.committed_key("r", 3))
    found = writer.store.stage(3, "rollout")
    assert found
    manifest = found[0]
    assert writer.store.lookup(3, "rollout", manifest.inputs, manifest.config_digest) is None


def test_prompts_of_mixed_files_are_checked_against_their_order() -> None:
    order = Order((3, 5), (1.0, 1.0), 7, True)
    places = [divmod(k, order.size) for k in range(20)]
    prompts = [f"p{order.position_at(place)}" for place in places]
    cursor = {"epoch": 0, "offset": 0, "next_epoch": 2, "next_offset": 4, "size": order.size}
    config = {"run": {"seed": 7}, "data": {"shuffle": True}}

    def found(prompts: list[str], mix: dict[str, Any] | None) -> list[str]:
        checked = _PromptOrder(config)
        checked.mix = mix
        return list(checked.faults(cursor, prompts, {}, {}, {}))

    mix = {"sizes": [3, 5], "weights": [1.0, 1.0]}
    assert found(prompts, mix) == []
    swapped = [prompts[1], prompts[0], *prompts[2:]]
    assert any("the data plan has row" in fault for fault in found(swapped, mix))
    assert found(prompts, None)
