"""The paper's baseline: every node prefills and decodes, as vLLM 0.5 does; plain, with a prefix cache, or chunked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from shared.workload.trace import BLOCK, TraceRequest
from simulator.batch import Batch, Floats, Sequence
from simulator.clock import Clock
from simulator.pool import Pool
from simulator.request import Request, tail_mean
from simulator.settings import CoupledSettings


@dataclass(eq=False, slots=True)
class Prompt:
    """``done``: tokens cached or computed."""

    request: Request
    room: int
    done: int = -1


class CoupledInstance:
    """Waiting prompts go before decoding: all that have room in one step, or a chunk a step beside the batch."""

    def __init__(self, clock: Clock, settings: CoupledSettings, ended: Callable[[Request], None]) -> None:
        self.clock, self._settings, self._ended = clock, settings, ended
        self._batch = Batch(settings.hardware.decode)
        self._pool = Pool(settings.hardware.hbm / BLOCK if settings.prefix_cache else 0, 0, lambda block, tier: None)
        self._waiting: deque[Prompt] = deque()
        self._rooms: dict[Request, int] = {}
        self._left = settings.hardware.hbm // BLOCK
        self._planned: Floats = np.empty(0)
        self._number = 0
        self._busy = False
        self.load = 0.0
        """Tokens of what waits or runs: what the least loaded one has least of."""

    def submit(self, request: Request) -> None:
        trace = request.trace
        room = -(-(trace.input_tokens + request.output) // BLOCK)
        self.load += trace.input_tokens + request.output
        self._waiting.append(Prompt(request, room))
        if not self._busy:
            self._boundary()
        elif len(self._planned):
            kept = int(self._planned.searchsorted(self.clock.now, "left")) + 1
            if kept < len(self._planned):
                self._planned = self._planned[:kept]
                self._schedule()

    def _schedule(self) -> None:
        self._number += 1
        self._busy = True
        self.clock.at(float(self._planned[-1]), self._over, self._number)

    def _over(self, number: int) -> None:
        if number == self._number:
            self._batch.advance(self._planned)
            self._planned = np.empty(0)
            self._boundary()

    def _boundary(self) -> None:
        for sequence in self._batch.leave():
            self._end(sequence)
        self._busy = False
        if self._fits():
            if self._settings.chunked:
                self._chunk_step()
            else:
                self._prefill_step()
        elif len(self._batch):
            self._planned = self._batch.plan(self.clock.now)
            self._schedule()

    def _fits(self) -> bool:
        """The first that waits may begin, or has; one that exceeds everything begins alone."""
        if not self._waiting:
            return False
        first = self._waiting[0]
        return first.done >= 0 or (
            len(self._batch) < self._settings.max_batch and (first.room <= self._left or not self._rooms)
        )

    def _begin(self, prompt: Prompt) -> None:
        request = prompt.request
        self._left -= prompt.room
        self._rooms[request] = prompt.room
        here, _ = self._pool.match(request.trace.hash_ids)
        prompt.done = request.hit = min(here * BLOCK, request.trace.input_tokens - 1)
        request.attempts = 1

    def _prefill_step(self) -> None:
        """Decoding stands still meanwhile."""
        model, seconds, tokens = self._settings.hardware.prefill, 0.0, 0
        prompts: list[Prompt] = []
        while self._fits():
            first = self._waiting[0]
            self._begin(first)
            new = first.request.trace.input_tokens - first.done
            if prompts and tokens + new > self._settings.most_prefill:
                self._unbegin(first)
                break
            tokens += new
            first.request.compute = model.seconds(first.request.trace.input_tokens, first.done)
            seconds += first.request.compute
            prompts.append(self._waiting.popleft())
        self._busy = True
        self.clock.after(seconds, self._prefilled, prompts)

    def _unbegin(self, prompt: Prompt) -> None:
        self._left += self._rooms.pop(prompt.request)
        prompt.done = -1

    def _prefilled(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            self._first_token(prompt)
        self._boundary()

    def _chunk_step(self) -> None:
        """One step of the batch with as many prompt tokens as its budget leaves. Nothing of the two overlaps: vLLM 0.5
        attends to prompts and to the batch in kernels of their own, and most of ``decode.base`` is its host's work."""
        model, decode = self._settings.hardware.prefill, self._settings.hardware.decode
        budget, seconds = max(1, self._settings.budget - len(self._batch)), 0.0
        finished: list[Prompt] = []
        while budget > 0 and self._fits():
            prompt = self._waiting[0]
            if prompt.done < 0:
                self._begin(prompt)
            upto = min(prompt.request.trace.input_tokens, prompt.done + budget)
            seconds += model.seconds(upto, prompt.done)
            budget -= upto - prompt.done
            prompt.done = upto
            if upto < prompt.request.trace.input_tokens:
                break
            finished.append(self._waiting.popleft())
        batch = len(self._batch)
        beside = decode.per_sequence * batch + decode.per_token * self._batch.context
        seconds += beside
        for prompt in {prompt.request.number: prompt for prompt in (*finished, *list(self._waiting)[:1])}.values():
            if prompt.done >= 0:
                prompt.request.compute += seconds
        self._busy = True
        self.clock.after(seconds + (decode.base if batch else 0.0), self._chunked, finished)

    def _chunked(self, finished: list[Prompt]) -> None:
        if len(self._batch):
            self._batch.advance(np.array([self.clock.now]))
        for prompt in finished:
            self._first_token(prompt)
        self._boundary()

    def _first_token(self, prompt: Prompt) -> None:
        request = prompt.request
        request.first_token = self.clock.now
        if self._settings.prefix_cache:
            self._pool.put(request.trace.hash_ids)
        if request.output > 1:
            self._batch.join(Sequence(request, request.trace.input_tokens + 1, request.output - 1))
        else:
            self._leave(request)

    def _end(self, sequence: Sequence) -> None:
        request = sequence.request
        intervals = np.diff(self._batch.ends(sequence), prepend=request.first_token)
        request.tbt_decode = tail_mean(intervals[1:])
        request.tbt, request.tbt_mean = tail_mean(intervals), float(intervals.mean())
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self._left += self._rooms.pop(request)
        self.load -= request.trace.input_tokens + request.output
        request.finished, request.ended = self.clock.now, "done"
        self._ended(request)


class Coupled:
    """Build it, :meth:`run` a trace through it once."""

    def __init__(self, settings: CoupledSettings) -> None:
        self.clock = Clock()
        self.settings = settings
        self.instances = [CoupledInstance(self.clock, settings, self._ended) for _ in range(settings.nodes)]
        self._done = self._turn = 0

    def run(self, trace: Iterable[TraceRequest], progress: Callable[[int], None] | None = None) -> list[Request]:
        requests = [Request(number, one) for number, one in enumerate(trace)]
        for request in requests:
            self.clock.at(request.trace.arrival, self._arrive, request)
        if progress:
            self._tick(len(requests), progress)
        self.clock.run()
        return requests

    def _tick(self, count: int, progress: Callable[[int], None]) -> None:
        progress(self._done)
        if self._done < count:
            self.clock.after(10.0, self._tick, count, progress)

    def _arrive(self, request: Request) -> None:
        """In turn, or where least is to be done, equals in turn."""
        size = len(self.instances)
        order = [(self._turn + n) % size for n in range(size)]
        least = self.settings.router == "least_loaded"
        chosen = min(order, key=lambda n: self.instances[n].load) if least else order[0]
        self._turn = chosen + 1
        self.instances[chosen].submit(request)

    def _ended(self, request: Request) -> None:
        self._done += 1
