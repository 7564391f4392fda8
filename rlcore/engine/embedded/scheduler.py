"""The worker: one thread that owns the model and all requests in flight.

Other threads hand it commands (start these requests, abort, pause, new weights); it obeys between
two forward passes. Waiting prompts are read before running requests go on, so that decode batches
are full.

Invariants:
- Only the worker thread touches the model, the lanes and the rows.
- A request that was taken in always finishes: with a stop, its length, or an abort.
- Weights change only when nothing runs, or while generation is paused.
"""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch

from rlcore.engine.embedded.kv import Ints, Lane, Prompt, PromptCache
from rlcore.engine.embedded.protocol import Call, Request
from rlcore.engine.embedded.rows import Rows
from rlcore.engine.embedded.runner import ModelRunner, padded
from rlcore.engine.embedded.sampling import derive_seed
from rlcore.errors import EngineError

log = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_LANE_BYTES = 64 << 20
"""An empty lane that holds more memory than this is given up."""

ABORTED: dict[str, object] = {
    "type": "abort",
    "message": "Aborted",
    "status_code": None,
    "err_type": None,
}


class Scheduler:
    """Continuous batching over a `ModelRunner`. `start` runs the worker; all else is
    thread-safe.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: Rows,
        *,
        max_total_tokens: int,
        prompt_cache_bytes: int,
        random_seed: int,
        weight_version: str,
    ) -> None:
        self.runner = runner
        self.weight_version = weight_version
        self.paused = False
        self.released: frozenset[str] = frozenset()
        self.failure: BaseException | None = None
        self._rows = rows
        self._lanes: dict[int, Lane] = {}
        self._waiting: list[Request] = []
        self._held: list[Request] = []
        """Came after an action that awaits the end of all before."""
        self._calls: dict[int, Call] = {}
        self._prompts = PromptCache(prompt_cache_bytes)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._when_idle: list[Callable[[], None]] = []
        self._max_total_tokens = max_total_tokens
        self._reserved_tokens = 0
        self._random_seed = random_seed
        self._unseeded = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-worker", daemon=True)

    # -- from other threads ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the worker thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the worker after the forward pass in progress."""
        self._commands.put(self._stop)
        self._thread.join(timeout=5)

    def submit(self, call: Call) -> None:
        """Take in the requests of a call; `call.done` is called when the last has finished."""
        self._commands.put(lambda: self._take_in(call))

    def ask(self, action: Callable[[], T], when_idle: bool = False) -> "Future[T]":
        """Run `action` in the worker between two forward passes. With `when_idle` only once all
        requests that came before have ended (later ones wait), or at once if generation is paused.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)

        def obey() -> None:
            if when_idle and not self._idle and not self.paused:
                self._when_idle.append(run)
            else:
                run()

        self._commands.put(obey)
        return future

    @property
    def running(self) -> int:
        """Requests being generated."""
        # A copy: other threads ask while the worker adds lanes.
        return sum(lane.count for lane in list(self._lanes.values()))

    @property
    def unable(self) -> str | None:
        """Why nothing can be generated for want of memory or weights, if so."""
        if self.released:
            return (
                f"The engine's {_listed(self.released)} memory is released; call "
                "/resume_memory_occupation first."
            )
        if self.runner.empty:
            return (
                f"{len(self.runner.empty)} of the engine's weights were released and have no "
                "values since; update them first."
            )
        return None

    @property
    def waiting(self) -> int:
        """Requests not yet started."""
        return len(self._waiting) + len(self._held)

    @property
    def tokens(self) -> int:
        """Tokens reserved for running requests."""
        return self._reserved_tokens

    # -- actions, to be run through `ask` ----------------------------------------------------------

    def abort(self, rid: str | None) -> int:
        """End the requests that carry `rid` (None: all) where they are; returns how many."""

        def hit(request: Request) -> bool:
            return rid is None or rid in (request.rid, request.group)

        ended = [request for request in self._waiting + self._held if hit(request)]
        self._waiting = [request for request in self._waiting if not hit(request)]
        self._held = [request for request in self._held if not hit(request)]
        for request in ended:
            self._end(request, ABORTED)
        for lane in self._lanes.values():
            rows = lane.rows[: lane.count]
            gone = np.array([hit(self._rows.request(row)) for row in rows.tolist()], dtype=np.bool_)
            for row in rows[gone].tolist():
                ended.append(self._rows.request(row))
                self._release_row(row, ABORTED)
            lane.remove(gone)
        return len(ended)

    def pause(self, mode: str) -> None:
        """Stop generating: `abort` ends what is in flight, `in_place` keeps it for `resume`."""
        if mode not in ("abort", "in_place"):
            raise EngineError(
                f"Pause mode '{mode}' is not offered by this engine; use 'abort' or 'in_place' "
                "('retract' ends a real server at the next weight update)."
            )
        if mode == "abort":
            self.abort(None)
        self.paused = True

    def resume(self) -> None:
        """Go on generating."""
        self.paused = False

    def flush(self) -> bool:
        """Forget cached prompts and free cache memory; False, with nothing done, while requests are
        running or waiting."""
        if self.running or self.waiting:
            return False
        self._lanes.clear()
        self._prompts.clear()
        return True

    def update(
        self, apply: Callable[[ModelRunner], int], flush_cache: bool, version: str | None
    ) -> int:
        """Change weights; returns what `apply` does. Running requests keep their cache (pause in
        place with flush_cache=false), cached prompts never outlive the weights that read them.
        """
        if "weights" in self.released:
            raise EngineError("The weights are released; call /resume_memory_occupation first.")
        if flush_cache and self.running:
            raise EngineError(
                "The cache cannot be flushed while requests are paused in place; send "
                "flush_cache=false, or pause with mode 'abort'."
            )
        count = apply(self.runner)
        self._prompts.clear()
        if version is not None:
            self._note_policy()
            self.weight_version = version
        return count

    def _note_policy(self) -> None:
        """Remember which tokens of what is running are by the policy so far."""
        for lane in self._lanes.values():
            for row in lane.rows[: lane.count].tolist():
                request = self._rows.request(row)
                request.weight_version = self.weight_version
                request.earlier = request.policies

    def release(self, tags: frozenset[str]) -> None:
        """Give back the memory of `weights` and `kv_cache`; refused while requests are in flight,
        and for what is released already, of which a real server dies.
        """
        if tags & self.released:
            raise EngineError(f"{_listed(tags & self.released)} memory is released already.")
        if self.running or self.waiting:
            raise EngineError(
                f"Memory cannot be released with {self.running} running and {self.waiting} waiting "
                "requests; pause with mode 'abort' first."
            )
        if "kv_cache" in tags:
            self.flush()
        if "weights" in tags:
            self._prompts.clear()
            self.runner.release()
        self.released |= tags

    def reoccupy(self, tags: frozenset[str]) -> None:
        """Take memory back; weights have no values until they are updated."""
        if not tags <= self.released:
            raise EngineError(f"{_listed(tags - self.released)} memory was not released.")
        if "weights" in tags:
            self.runner.resume()
        self.released -= tags

    # -- the worker --------------------------------------------------------------------------------

    def _run(self) -> None:
        with torch.inference_mode():
            try:
                while not self._stopping:
                    self._turn()
            except Exception as error:
                log.exception("the engine's worker failed")
                self.failure = error
                self._fail_rest()
        # Commands still get an answer, so that no caller hangs while the supervisor replaces us.
        while not self._stopping:
            self._commands.get()()

    def _turn(self) -> None:
        self._obey()
        if self._when_idle and self._idle:
            self._run_held_actions()
        elif self._busy() and not self._admit():
            self._step()

    def _run_held_actions(self) -> None:
        for action in self._when_idle:
            action()
        self._when_idle.clear()
        self._waiting, self._held = self._waiting + self._held, []

    @property
    def _idle(self) -> bool:
        return not self.running and not self._waiting

    def _busy(self) -> bool:
        return not self.paused and not self._idle

    def _obey(self) -> None:
        """Run the commands that have come; with nothing else to do, wait for one."""
        if not self._busy() and not (self._when_idle and self._idle):
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _fail_rest(self) -> None:
        """End what is in flight after a failure, wherever it was at that moment."""
        finish = {**ABORTED, "message": f"The engine failed: {self.failure}", "status_code": 500}
        for call in {id(call): call for call in self._calls.values()}.values():
            for request in call.requests:
                request.finish = request.finish or finish
            call.pending = 0
            call.done()
        self._calls.clear()
        self._waiting.clear()
        self._held.clear()
        self._lanes.clear()
        self._run_held_actions()

    def _take_in(self, call: Call) -> None:
        for request in call.requests:
            self._calls[id(request)] = call
            if request.seed is None:
                self._unseeded += 1
                request.seed = derive_seed(self._random_seed, self._unseeded)
            else:
                request.seed = derive_seed(request.seed, request.sample)
        (self._held if self._when_idle else self._waiting).extend(call.requests)
        if self.failure is not None:
            self._fail_rest()

    def _admit(self) -> bool:
        """Start waiting requests: those whose prompt is cached and one batch of new prompts. False
        when there is no room, or none waits.
        """
        chosen, fresh = self._choose()
        if not chosen:
            return False
        prompts = {r.key: self._prompts.get(r.key) for r in chosen if r.key in self._prompts}
        if fresh:
            read = self.runner.prefill(
                [request.tokens for request in fresh], [request.images for request in fresh]
            )
            for request, prompt in zip(fresh, read, strict=True):
                prompts[request.key] = prompt
                self._prompts.put(request.key, prompt)
        first = {id(request) for request in fresh}
        for request in chosen:
            request.cached_tokens = 0 if id(request) in first else len(request.tokens) - 1
        self._score(chosen, prompts)
        largest = self.runner.largest_batch
        for begin in range(0, len(chosen), largest):
            self._begin(chosen[begin : begin + largest], prompts)
        return True

    def _choose(self) -> tuple[list[Request], list[Request]]:
        """(requests to start now, those of them whose prompt must be read first), in order of
        arrival.
        """
        chosen: list[Request] = []
        fresh: dict[bytes, Request] = {}
        skipped: list[Request] = []
        length = together = taken = 0
        for request in self._waiting:
            cost = self._cost(request)
            full = self._reserved_tokens + cost > self._max_total_tokens
            if len(chosen) == self._rows.available or (full and (chosen or self.running)):
                break
            taken += 1
            if request.key not in self._prompts and request.key not in fresh:
                if not fresh:
                    length = padded(len(request.tokens))
                    together = self.runner.prompts_together(length)
                if len(fresh) == together or padded(len(request.tokens)) != length:
                    skipped.append(request)
                    continue
                fresh[request.key] = request
            chosen.append(request)
            self._reserved_tokens += cost
        self._waiting = skipped + self._waiting[taken:]
        return chosen, list(fresh.values())

    def _cost(self, request: Request) -> int:
        """Cache positions that a request may come to hold."""
        return self.runner.lane_length(len(request.tokens) + request.max_new_tokens)

    def _score(self, chosen: list[Request], prompts: dict[bytes, Prompt]) -> None:
        """Log-probabilities of prompt tokens for the requests that want them."""
        known: dict[tuple[bytes, int, int], Any] = {}
        for request in chosen:
            if request.logprob_start >= len(request.tokens):
                continue
            what = (request.key, request.logprob_start, request.top_logprobs)
            if what not in known:
                known[what] = self.runner.score(
                    prompts[request.key],
                    request.tokens,
                    request.logprob_start,
                    request.top_logprobs,
                )
            values, tops = known[what]
            # As SGLang answers: the first token asked for has no value.
            request.input_logprobs = [None, *values]
            request.input_top = [None, *tops]

    def _begin(self, requests: list[Request], prompts: dict[bytes, Prompt]) -> None:
        """Choose the first tokens of `requests` and put what goes on into lanes."""
        for request in requests:
            if request.routed and (experts := prompts[request.key].experts) is not None:
                request.experts.append(experts)
            if request.max_new_tokens == 0:
                self._reserved_tokens -= self._cost(request)
                self._end(request, {"type": "length", "length": 0})
        running = [request for request in requests if request.max_new_tokens > 0]
        if not running:
            return
        rows = np.array([self._rows.add(request) for request in running], dtype=np.int64)
        keys = {request.key: None for request in running}
        order = {key: i for i, key in enumerate(keys)}
        logits = torch.stack([prompts[key].logits for key in keys])
        which = np.array([order[request.key] for request in running], dtype=np.int64)
        done = self._rows.advance(rows, logits[torch.from_numpy(which).to(logits.device)])
        for row in rows[done].tolist():
            self._release_row(row)
        for key, i in order.items():
            going = rows[(which == i) & ~done]
            if len(going):
                self._lane(int(self._rows.length[going[0]])).append(going, prompts[key].kv)

    def _lane(self, tokens: int) -> Lane:
        length = self.runner.lane_length(tokens)
        if length not in self._lanes:
            self._lanes[length] = Lane(self.runner.kv_shape, length)
        return self._lanes[length]

    def _step(self) -> None:
        """One token for every running request; longest lanes first, so that none moves into a lane
        that is still to come.
        """
        for length in sorted(self._lanes, reverse=True):
            lane = self._lanes[length]
            if not lane.count:
                continue
            rows = lane.rows[: lane.count].copy()
            done = np.zeros(len(rows), dtype=np.bool_)
            for begin in range(0, len(rows), self.runner.largest_batch):
                part = rows[begin : begin + self.runner.largest_batch]
                device = self.runner.device
                logits = self.runner.decode(
                    lane,
                    begin,
                    torch.from_numpy(self._rows.last[part]).to(device),
                    torch.from_numpy(self._rows.length[part] - 1).to(device),
                    torch.from_numpy(self._rows.shift[part]).to(device),
                )
                self._note_experts(part)
                done[begin : begin + len(part)] = self._rows.advance(part, logits)
            outgrown = np.flatnonzero(~done & (self._rows.length[rows] > length))
            if len(outgrown):
                self._lane(2 * length).append(rows[outgrown], lane.take(outgrown))
            for row in rows[done].tolist():
                self._release_row(row)
            done[outgrown] = True
            lane.remove(done)
            if not lane.count and lane.kv.nbytes > IDLE_LANE_BYTES:
                del self._lanes[length]

    def _note_experts(self, rows: Ints) -> None:
        """Remember what the newest tokens of some rows were sent to, for those who want it."""
        chosen = self.runner.experts()
        if chosen is None:
            return
        chosen = chosen.cpu()
        for i, row in enumerate(rows.tolist()):
            if (request := self._rows.request(row)).routed:
                request.experts.append(chosen[i : i + 1])

    def _release_row(self, row: int, finish: dict[str, object] | None = None) -> None:
        request = self._rows.request(row)
        self._reserved_tokens -= self._cost(request)
        self._rows.free(row)
        self._end(request, finish)

    def _end(self, request: Request, finish: dict[str, object] | None) -> None:
        if finish is not None:
            request.finish = finish
        request.weight_version = self.weight_version
        self._calls.pop(id(request)).finished_one()


def _listed(tags: frozenset[str]) -> str:
    return " and ".join(sorted(tags))
