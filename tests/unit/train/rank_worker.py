"""One rank of a trainer in a process of its own: runs a pickled job and pickles what came of it.

`python rank_worker.py JOB RANK WORLD PORT`; JOB is a file, the result goes to `JOB.RANK`.
"""

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rlcore.train.fsdp.trainer import FsdpTrainer


def main() -> None:
    job_file, rank, world, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world)
    )
    dist.init_process_group("gloo")
    job = pickle.loads(job_file.read_bytes())
    trainer = FsdpTrainer(job["train"], job["algorithm"], temperature=1.0, seed=0, device="cpu")
    trainer.load(job["model"], "start")
    out: dict[str, object] = {}
    if job.get("restore"):
        out["restored"] = trainer.load_state(job["restore"], "start")
    reports = []
    for k, shares in enumerate(job["batches"]):
        held = trainer.loaded
        assert held is not None
        reports.append(trainer.train(held, f"after-{k}", shares[rank]).metrics)
    out["reports"] = reports
    if job.get("save"):
        out["saved"] = trainer.save_state(job["save"])
    if job.get("export"):
        trainer.export_hf(job["export"], "float32")
    out["log_probs"] = trainer.log_probs(job.get("sequences", [[1, 2, 3]]))
    Path(f"{job_file}.{rank}").write_bytes(pickle.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
