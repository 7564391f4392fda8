"""Tokens a second of Sluice's rollout stage against a bare client of the same server.

Both ask for the same samples with log-probs, turn by turn:

- sluice: the rollout worker as a run has it, until its batch is committed to a store on a disk;
  `generate` is the part of that until all samples are there;
- bare: the same requests by an HTTP client that reads the bytes of the answers and nothing more, as
  one call and as a call for each sample. The faster of the two is the measure.

The engine's cache is emptied before each turn.

Run: python -m benchmarks.rollout [--repeats N] [--server KEY=VALUE ...] [--tiny]
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from benchmarks import _shapes
from benchmarks._common import RESULTS, finish, keep, machine, parsed, say, spread, tail
from benchmarks._server import SGLANG, serving
from rlcore.cluster.rollout_actor import RolloutActor
from rlcore.cluster.rollout_plan import RolloutPlan
from rlcore.config import build_config
from rlcore.rollout.generate import sampling_params
from rlcore.store.lease import Lease
from rlcore.store.manifest import Manifest
from rlcore.store.objects import Objects
from rlcore.store.paths import new_attempt
from rlcore.store.run_store import RunStore

GOAL = 0.95
RUN = "rollout"
CALL_S = 300.0


@dataclass(frozen=True)
class Size:
    """What is asked for at once."""

    shape: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int

    @property
    def requests(self) -> int:
        """Samples."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Generated."""
        return self.requests * self.new_tokens


FULL = (Size("qwen3-0.6B", 32, 8, 64, 512), Size("qwen3-0.6B", 128, 8, 64, 512))
TINY = (Size("tiny", 4, 4, 8, 16),)


class Ours:
    """The rollout worker and a store to commit to."""

    def __init__(self, size: Size, model: Path, folder: Path) -> None:
        folder.mkdir()
        made = _shapes.prompts(size.shape, size.prompts, size.prompt_tokens)
        data = _shapes.write_prompts(folder / "prompts.jsonl", made)
        self.config = build_config(
            {
                "run": {"id": RUN},
                "model": {"path": str(model)},
                "data": {"path": str(data), "shuffle": False},
                "reward": {"rm_type": "math"},
                "rollout": {
                    "rollout_batch_size": size.prompts,
                    "n_samples_per_prompt": size.samples,
                    "max_response_len": size.new_tokens,
                    "concurrency": size.requests,
                    "request_timeout_s": CALL_S,
                },
                "train": {"global_batch_size": size.requests},
                "storage": {"root": str(folder / "root")},
            }
        )
        self._objects = Objects.open(self.config.storage.root)
        self._store = RunStore(self._objects, RUN)
        self._store.create_run({"config": self.config.model_dump(mode="json")})
        self._lease = Lease.acquire(self._objects, RUN)
        self._actor = RolloutActor(self._plan(str(model)))
        self._iteration = 0
        self._cursor: dict[str, Any] | None = None

    def _plan(self, model: str) -> RolloutPlan:
        config = self.config
        return RolloutPlan(
            run_id=RUN,
            seed=0,
            root=config.storage.root,
            options={},
            model_folder=model,
            model=config.model,
            data=config.data,
            rollout=config.rollout,
            reward=config.reward,
            filter=config.filter,
            eval=config.eval,
        )

    async def start(self, url: str) -> None:
        """Load data and tokenizer, connect."""
        await self._actor.set_engines([url])
        await self._actor.ping()

    async def turn(self) -> dict[str, float]:
        """Make a rollout and commit it; seconds by part."""
        began, attempt, i = time.perf_counter(), new_attempt(), self._iteration
        report = await self._actor.rollout(self._lease.epoch, i, attempt, self._cursor, 0)
        manifest = Manifest(
            run_id=RUN,
            iteration=i,
            stage="rollout",
            files=list(report.files),
            config_digest="",
            epoch=self._lease.epoch,
            attempt=attempt,
            policy_version=0,
            cursor=report.cursor,
            metrics=report.metrics,
            extra=report.extra,
        )
        await asyncio.to_thread(self._store.commit, manifest, self._lease)
        seconds = time.perf_counter() - began
        self._iteration, self._cursor = i + 1, report.cursor
        generate, write = report.timings["generate"], report.timings["write"]
        return {"sluice": seconds, "generate": generate, "write": write}

    async def close(self) -> None:
        """End the worker."""
        await self._actor.close()
        self._lease.release()


class Bare:
    """A client that only sends and reads."""

    def __init__(self, size: Size, ours: Ours, url: str) -> None:
        self._size, self._url = size, f"{url}/generate"
        self._http = httpx.AsyncClient(
            timeout=CALL_S, trust_env=False, limits=httpx.Limits(max_connections=None)
        )
        prompts = _shapes.prompts(size.shape, size.prompts, size.prompt_tokens)
        ids = [prompt for prompt in prompts for _ in range(size.samples)]
        params = [
            sampling_params(ours.config.rollout) | {"sampling_seed": k} for k in range(len(ids))
        ]
        self._one = [orjson.dumps(self._body(ids, params))]
        self._each = [orjson.dumps(self._body(*pair)) for pair in zip(ids, params, strict=True)]

    def _body(self, ids: Any, params: Any) -> dict[str, Any]:
        return {"input_ids": ids, "sampling_params": params, "return_logprob": True}

    async def turn(self, calls: str) -> float:
        """Seconds for all samples, in one call or in one each."""
        bodies = self._one if calls == "one" else self._each
        began = time.perf_counter()
        answers = await asyncio.gather(*(self._post(body) for body in bodies))
        seconds = time.perf_counter() - began
        read = [orjson.loads(answer) for answer in answers]
        samples = read[0] if calls == "one" else read
        made = sum(len(sample["output_ids"]) for sample in samples)
        if made != self._size.tokens:
            raise SystemExit(f"the engine made {made} tokens, not {self._size.tokens}")
        return seconds

    async def _post(self, body: bytes) -> bytes:
        reply = await self._http.post(
            self._url, content=body, headers={"Content-Type": "application/json"}
        )
        reply.raise_for_status()
        return reply.content

    async def flush(self) -> None:
        """Empty the engine's cache."""
        await self._http.post(self._url.replace("/generate", "/flush_cache"))

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()


async def measure(
    size: Size, model: Path, folder: Path, url: str, repeats: int, note: Callable[..., None]
) -> dict[str, Any]:
    """Turn by turn, the first turn of each to warm up; `note` is given what there is so far."""
    ours = Ours(size, model, folder)
    await ours.start(url)
    bare = Bare(size, ours, url)
    taken: list[dict[str, float]] = []
    ways = ["one", "each"]
    try:
        for turn in range(repeats + 1):
            await bare.flush()
            one = await ours.turn()
            for calls in ways:
                await bare.flush()
                one[f"bare_{calls}"] = await bare.turn(calls)
            say(f"turn {turn}: " + ", ".join(f"{name} {s:.3f} s" for name, s in one.items()))
            # The way that takes longer is left.
            ways = [min(ways, key=lambda calls: one[f"bare_{calls}"])]
            taken.append(one)
            note(figures(size, taken[1:] or taken))
    finally:
        await bare.close()
        await ours.close()
    return figures(size, taken[1:])


def figures(size: Size, taken: list[dict[str, float]]) -> dict[str, Any]:
    """Rates, and the share of the bare client's."""
    seconds = {name: [turn[name] for turn in taken] for name in taken[-1]}
    raw = min(statistics.median(each) for name, each in seconds.items() if name.startswith("bare"))
    return {
        "requests": size.requests,
        "new_tokens": size.new_tokens,
        "seconds": {name: spread(each) for name, each in seconds.items()},
        "tokens_per_s": {
            name: round(size.tokens / statistics.median(seconds[name]))
            for name in seconds
            if name != "write"
        },
        "committed_of_bare": round(raw / statistics.median(seconds["sluice"]), 4),
        "generated_of_bare": round(raw / statistics.median(seconds["generate"]), 4),
    }


def main() -> int:
    """Measure, write the JSON, say whether the goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--server", action="append", default=[], help="an argument of SGLang's")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, to see that it works")
    parser.add_argument("--result", type=Path, default=RESULTS / "rollout.json")
    args = parser.parse_args()
    sizes = TINY if args.tiny else FULL
    sglang = None if args.tiny else SGLANG | {"mem_fraction_static": 0.75} | parsed(args.server)
    result: dict[str, Any] = {
        "benchmark": "rollout",
        "what": "seconds and tokens/s of a rollout with log-probs: until its batch is committed, "
        "until it is generated, and by a client that only reads the answers' bytes",
        "goal": f"committed_of_bare >= {GOAL} for each number of requests",
        "met": False,
        "shape": sizes[0].shape,
        "server": sglang,
        "sizes": [],
        "errors": {},
        "machine": machine("torch", "sglang", "httpx", "orjson", "pyarrow"),
    }
    with tempfile.TemporaryDirectory(prefix="sluice-rollout-") as name:
        folder, log = Path(name), Path(name) / "engine.log"
        try:
            model = _shapes.build(sizes[0].shape, folder / "model")
            context = sizes[0].prompt_tokens + sizes[0].new_tokens + 32
            with serving(model, log, sglang=sglang, context=context) as url:
                for k, size in enumerate(sizes):
                    say(f"{size.requests} requests of {size.new_tokens} tokens")
                    done = list(result["sizes"])

                    def note(found: dict[str, Any], done: list[dict[str, Any]] = done) -> None:
                        keep(result | {"sizes": [*done, found]}, args.result)

                    work = measure(size, model, folder / str(k), url, args.repeats, note)
                    result["sizes"].append(asyncio.run(work))
        except Exception as error:
            result["errors"]["rollout"] = f"{type(error).__name__}: {error}"
            say(f"failed: {error}\n{tail(log, 60)}")
    shares = [one["committed_of_bare"] for one in result["sizes"]]
    result["met"] = len(shares) == len(sizes) and min(shares) >= GOAL
    return finish(result, args.result)


if __name__ == "__main__":
    sys.exit(main())
