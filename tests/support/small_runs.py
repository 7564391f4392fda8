"""Runs written into a store as the stages would write them, with no actor and no model."""

from typing import Any

from rlcore.config import build_config
from rlcore.config.digest import STAGE_SECTIONS, tree_digest
from rlcore.sample import Sample, Status
from rlcore.store import paths
from rlcore.store.batch import SCORES, SELECTION, rows_to_table, samples_to_table, write_table
from rlcore.store.branch import plan_fork, refer_to_parent
from rlcore.store.lease import Lease
from rlcore.store.manifest import FileRef, Manifest, StageRef, chain_state_id, sha256_hex
from rlcore.store.objects import Objects
from rlcore.store.run_store import RunStore

SIZE, GROUPS, MEMBERS = 5, 2, 2
Refs = dict[str, StageRef]


def config_tree(run_id: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The stored configuration of a small run."""
    tree: dict[str, Any] = {
        "run": {"seed": 3},
        "model": {"path": "/models/tiny"},
        "data": {"path": "/data/rows.jsonl", "shuffle": False},
        "rollout": {"rollout_batch_size": GROUPS, "n_samples_per_prompt": MEMBERS},
        "train": {"global_batch_size": GROUPS * MEMBERS, "num_iterations": 6},
        "reward": {"custom_rm_path": "/rewards.py:reward"},
        "storage": {"root": "/root"},
    }
    for name, keys in sections.items():
        tree[name] = tree.get(name, {}) | keys
    tree["run"] |= {"id": run_id}
    return build_config(tree).model_dump(mode="json")


def fork(
    objects: Objects, parent: str, iteration: int, name: str, rerun: str | None = None, **sets: Any
) -> RunStore:
    """Make a fork, its settings given as `section=dict(key=value)`."""
    tree = RunStore(objects, parent).load_run()["config"]
    for section, keys in sets.items():
        tree[section] |= keys
    tree["run"]["id"] = name
    given = {f"{section}.{key}" for section, keys in sets.items() for key in keys}
    source = RunStore(objects, parent)
    plan = plan_fork(source, iteration, tree, code="test", rerun=rerun, given=given)
    return plan.make()


class SmallRun:
    """Drives a run that is there or, given a configuration, is made."""

    def __init__(self, objects: Objects, run_id: str, tree: dict[str, Any] | None = None) -> None:
        self.objects = objects
        self.store = RunStore(objects, run_id)
        if tree is not None:
            self.store.create_run({"config": tree, "config_digest": tree_digest(tree)})
        self.config = self.store.load_run()["config"]
        self.lease = Lease.acquire(objects, run_id)
        refer_to_parent(self.store, self.lease)

    def run(self, until: int) -> "SmallRun":
        """Commit all iterations below `until`, and give the run back."""
        last = self.store.last_committed()
        for i in range(0 if last is None else last + 1, until):
            self.iteration(i)
        self.lease.release()
        return self

    def iteration(self, i: int, *, commit: bool = True) -> Refs:
        """One iteration; stages that are committed stay."""
        before = self.store.committed(i - 1) if i else None
        refs: Refs = {}
        policy = {"policy": StageRef(**before["stages"]["weight_sync"])} if before else {}
        refs["rollout"] = self.stage(i, "rollout", policy)
        refs["reward"] = self.stage(i, "reward", {"rollout": refs["rollout"]})
        refs["filter"] = self.stage(i, "filter", dict(refs))
        refs["train"] = self.stage(i, "train", dict(refs))
        refs["weight_sync"] = self.stage(i, "weight_sync", {"train": refs["train"]})
        refs["checkpoint"] = self.stage(i, "checkpoint", {"train": refs["train"]})
        if commit:
            metrics = {"seconds": 1.0, "rollout/raw_reward": i / 10, "train/loss": 0.5}
            self.store.commit_iteration(i, {"stages": refs, "metrics": metrics}, self.lease)
        return refs

    def stage(self, i: int, name: str, inputs: Refs) -> StageRef:
        """One stage."""
        found = self.store.stage(i, name)
        if found is not None:
            return found[1]
        fields: dict[str, Any] = {
            "run_id": self.store.run_id,
            "iteration": i,
            "stage": name,
            "config_digest": self._digest(name),
            "epoch": self.lease.epoch,
            "attempt": paths.new_attempt(),
            "inputs": {key: ref.sha256 for key, ref in inputs.items()},
        }
        return self.store.commit(Manifest(**fields | self._made(i, name, inputs)), self.lease)

    def _digest(self, name: str) -> str:
        return tree_digest(self.config, *STAGE_SECTIONS.get(name, ("weights",)))

    def _made(self, i: int, name: str, inputs: Refs) -> dict[str, Any]:
        places = range(i * GROUPS, (i + 1) * GROUPS)
        made = samples(i, [f"p{place % SIZE}" for place in places])
        if name == "rollout":
            start, end = divmod(places[0], SIZE), divmod(places[-1] + 1, SIZE)
            cursor = {"epoch": start[0], "offset": start[1], "size": SIZE}
            cursor |= {"next_epoch": end[0], "next_offset": end[1]}
            return {"files": (self._table(i, name, samples_to_table(made)),), "cursor": cursor}
        if name == "reward":
            return {"files": (self._table(i, name, rows_to_table(SCORES, scores(made))),)}
        if name == "filter":
            rows = rows_to_table(SELECTION, selection(made))
            return {"files": (self._table(i, name, rows),)}
        if name == "train":
            batch = [inputs[stage].sha256 for stage in ("rollout", "reward", "filter")]
            before = self.store.stage(i - 1, "train") if i else None
            start_id = before[0].extra["state_id"] if before else "start"
            state_id = chain_state_id(start_id, batch, self._digest("train"))
            extra = {"prev_state_id": start_id, "state_id": state_id, "samples": len(made)}
            return {"extra": extra | {"state": self.folder(i, "train", state_id)}}
        if name == "checkpoint":
            return {"extra": {"checkpoint": self.folder(i, "checkpoint", "hf")}}
        return {}

    def folder(self, i: int, stage: str, content: str) -> dict[str, Any]:
        """A saved state or checkpoint."""
        prefix = f"{paths.stage_prefix(self.store.run_id, i, stage)}/kept-{paths.new_attempt()}"
        data = content.encode()
        self.objects.put(f"{prefix}/model.bin", data)
        file = FileRef(key=f"{prefix}/model.bin", bytes=len(data), sha256=sha256_hex(data))
        digests = {"model_sha256": content, "optimizer_sha256": content}
        return {"key_prefix": prefix, "files": [file.model_dump()], **digests}

    def orphan(self, i: int, stage: str) -> str:
        """A part of an attempt that did not commit."""
        key = paths.part_key(self.store.run_id, i, stage, 0, paths.new_attempt())
        self.objects.put(key, b"nobody's")
        return key

    def _table(self, i: int, stage: str, table: Any) -> FileRef:
        key = paths.part_key(self.store.run_id, i, stage, 0, paths.new_attempt())
        return write_table(self.objects, key, table)


def samples(i: int, prompts: list[str]) -> list[Sample]:
    """Responses to prompts."""
    return [
        Sample(
            group_index=g,
            index=g * MEMBERS + m,
            prompt_id=prompt,
            prompt=f"{prompt}=",
            tokens=[1, 2, 3 + m],
            response="7" * (m + 1),
            response_length=2,
            rollout_log_probs=[-1.0, -2.0],
            status=Status.COMPLETED,
            weight_versions=[str(i)],
        )
        for g, prompt in enumerate(prompts)
        for m in range(MEMBERS)
    ]


def scores(made: list[Sample]) -> list[dict[str, Any]]:
    """A score a sample: the longer, the better."""
    return [
        {
            "row": row,
            "prompt_id": s.prompt_id,
            "group_index": s.group_index,
            "index": s.index,
            "reward": float(len(s.response)),
            "status": "completed",
            "details": None,
            "error": None,
        }
        for row, s in enumerate(made)
    ]


def selection(made: list[Sample]) -> list[dict[str, Any]]:
    """All are kept."""
    return [
        {
            "row": row,
            "group_index": s.group_index,
            "index": s.index,
            "reward": float(len(s.response)),
            "keep": True,
            "reason": None,
        }
        for row, s in enumerate(made)
    ]
