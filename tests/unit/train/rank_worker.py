"""One rank of a trainer in a process of its own: runs pickled jobs and pickles what came of them.

`python rank_worker.py RANK WORLD PORT`; each line of standard input names a file with a job, whose
result goes to `FILE.RANK`, told by a line of standard output.
"""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlcore.train.fsdp.trainer import FsdpTrainer


def run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    trainer = FsdpTrainer(
        job["train"],
        job["algorithm"],
        temperature=1.0,
        seed=0,
        device="cpu",
        lora=job.get("lora"),
    )
    trainer.load(job["model"], "start")
    out: dict[str, Any] = {"reports": []}
    if job.get("restore"):
        out["restored"] = trainer.load_state(job["restore"], "start")
    if job.get("measure"):
        out["measured"] = trainer.measure(job["measure"][rank], job["algorithm"])
    for k, shares in enumerate(job["batches"]):
        assert trainer.loaded is not None
        report = trainer.train(trainer.loaded, f"after-{k}", shares[rank])
        out["reports"].append(report.metrics)
        if job.get("offload"):
            trainer.offload()
            trainer.onload()
    if job.get("save"):
        trainer.save_state(job["save"])
        out["saved"] = trainer.digest()
    if job.get("export"):
        trainer.export_hf(job["export"], "float32")
    out["log_probs"] = trainer.log_probs([[1, 2, 3]])
    return out


def main() -> None:
    rank, world, port = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=world)
    dist.init_process_group("gloo")
    for line in sys.stdin:
        file = Path(line.strip())
        result = run(pickle.loads(file.read_bytes()), int(rank))
        Path(f"{file}.{rank}").write_bytes(pickle.dumps(result))
        sys.stdout.write("done\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
