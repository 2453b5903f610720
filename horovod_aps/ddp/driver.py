"""Who moves the exchange on: a thread per exchange, from the first bucket of a step until its last one is reduced.

Between hand in and take out in the flow of data. DDP calls us for a handful of buckets and then waits in C++, so nobody
but a thread can move gradients while backward goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.errors import LostPeer

POLL_SECONDS = 50e-6  # between looks at a network that cannot tell when it has something
LOOK_SECONDS = 300e-6  # at most between looks while backward goes on, for there may be another bucket
WAIT_SECONDS = 1e-3  # at most when it is over
LISTEN_SECONDS = 5e-3  # while there is nothing on its way
END_SECONDS = 5.0  # that the thread may take to end


class Place:
    """Where the thread works on a device: on a CUDA device, a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def arrival(self, buffer: Tensor) -> Callable[[], None]:
        """What the thread calls before it reads a buffer that the present stream is about to fill."""
        if self._stream is None:
            return lambda: None
        buffer.record_stream(self._stream)
        filled = torch.cuda.current_stream(buffer.device).record_event()
        return partial(self._stream.wait_event, filled)


class Part:
    """One bucket of DDP's: its layers, and the future that its buffer is the result of."""

    def __init__(
        self, layers: list[Layer], buffer: Tensor, future: Future[Tensor], arrived: Callable[[], None]
    ) -> None:
        self.layers, self.buffer, self.future = layers, buffer, future
        self.arrived = arrived
        """Called by the thread before it reads the buffer."""

    def is_done(self) -> bool:
        return all(layer.done for layer in self.layers)


class Step:
    """The buckets of one backward, as they come in."""

    def __init__(self) -> None:
        self.arriving: deque[Part] = deque()
        self.waiting: list[Part] = []
        self.layers: list[Layer] = []
        self.closed = False
        """Whether the last bucket has come in."""
        self.over = threading.Event()
        self.error: BaseException | None = None

    def take_done(self) -> list[Part]:
        """The buckets that have got their results since the last time."""
        done = [part for part in self.waiting if part.is_done()]
        if done:
            self.waiting = [part for part in self.waiting if not part.is_done()]
        return done

    def end(self, error: BaseException | None) -> None:
        """Nothing more will come; without results the buffers go back as they are, for DDP waits for each of them."""
        self.error = error
        rest, self.waiting = [*self.waiting, *self.arriving], []
        for part in rest:
            part.future.set_result(part.buffer)
        self.over.set()


class Driver:
    """The thread of one exchange; it sleeps between steps."""

    def __init__(self, exchange: Exchange, place: Place) -> None:
        exchange.self_driven = True
        self.exchange, self.place = exchange, place
        self._changed = threading.Condition()
        self._step: Step | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def hand_in(self, part: Part) -> Step:
        """Take a bucket; the first one opens a step. Never blocks."""
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="horovod_aps ddp", daemon=True)
                self._thread.start()
            if self._step is None:
                self._step = Step()
            step = self._step
            step.arriving.append(part)
            self._changed.notify()
        return step

    def close_step(self) -> Step | None:
        """The last bucket has come in; returns the step that is to be waited for, if there is one."""
        with self._changed:
            step = self._step
            if step is not None:
                step.closed = True
                self._changed.notify()
        return step

    def end(self) -> None:
        """Nobody will use it again, or the program ends."""
        with self._changed:
            self._ended = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(END_SECONDS)

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._step is None and not self._ended:
                    self._changed.wait()
                step = self._step
            if step is None:
                return
            self._end_step(step)
            del step  # with DDP's buckets, while it waits for the next one

    def _end_step(self, step: Step) -> None:
        """Take a step to its end."""
        error: BaseException | None = None
        try:
            with self.place():
                self._carry(step)
        except BaseException as caught:
            error = caught
        with self._changed:
            while error is not None and not step.closed and not self._ended:  # DDP hands in the rest first
                self._changed.wait()
            self._step = None
        step.end(error)

    def _carry(self, step: Step) -> None:
        exchange = self.exchange
        while not step.closed and not self._ended:
            self._take_in(step)
            if exchange.look():
                self._hand_out(step)
            elif exchange.is_travelling:
                self._pause(LOOK_SECONDS)
            else:
                with self._changed:
                    if not step.arriving and not step.closed:
                        self._changed.wait(LISTEN_SECONDS)
        self._take_in(step)
        for moved in exchange.steps(step.layers):
            if self._ended:
                raise LostPeer("the program ends in the middle of a step")
            if moved:
                self._hand_out(step)
            else:
                self._pause(WAIT_SECONDS)
        self._hand_out(step)

    def _pause(self, seconds: float) -> None:
        """Until the network has something, if it can tell."""
        pause = getattr(self.exchange.transport, "pause", None)
        if pause is not None:
            pause(seconds)
        else:
            time.sleep(POLL_SECONDS)

    def _hand_out(self, step: Step) -> None:
        done = step.take_done()
        if done:
            self.exchange.kernels.end()
            for part in done:
                part.future.set_result(part.buffer)

    def _take_in(self, step: Step) -> None:
        while step.arriving:
            part = step.arriving.popleft()
            part.arrived()
            step.waiting.append(part)
            step.layers += part.layers
            self.exchange.submit(*part.layers)
