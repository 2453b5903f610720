"""Whoever waits keeps all exchanges of the process moving, not only its own.

Ranks may wait for the results of different exchanges in different orders. While Horovod itself holds the program, in a
wait of its own or in a long piece of backward, a thread does the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_aps.engine.exchange import Exchange

POLL_SECONDS = 50e-6  # between looks at the network while there is nothing else to do
CROWDED_POLL_SECONDS = 1e-3  # the same where ranks have to share cores, which every look takes from others
LOOKS = 20  # before one sleeps
NEAR_LOOKS = 200  # the same where all ranks are on this host, with a core each: a sleep takes longer than an answer
THREAD_SECONDS = 20e-3  # between looks of the thread; each takes the interpreter from whoever has it
ALONE_SECONDS = 0.1  # without a look by anyone else, after which the thread looks; sooner, it costs more than it brings
IMPATIENT_SECONDS = 0.1  # without any movement

_active: dict[int, Exchange] = {}  # that hold something
_lock = threading.Lock()
_awake = threading.Event()
_thread: threading.Thread | None = None
_last_look = 0.0
_waited: list[int] = []  # ids of the exchanges that somebody waits for


def add(exchange: Exchange) -> None:
    """The exchange holds something that others may wait for."""
    global _thread, _last_look
    with _lock:
        _active[id(exchange)] = exchange
        exchange.is_active = True
        _last_look = time.monotonic()
        if _thread is None or not _thread.is_alive() or _pid != os.getpid():
            _start_thread()
        _awake.set()


def remove(exchange: Exchange) -> None:
    """The exchange holds nothing any more."""
    with _lock:
        _active.pop(id(exchange), None)
        exchange.is_active = False


def run(exchange: Exchange, steps: Generator[bool, None, None]) -> None:
    """Take the steps of a wait to their end, and those of all other exchanges in between."""
    _waited.append(id(exchange))
    try:
        _run(exchange, steps)
    finally:
        _waited.remove(id(exchange))


def is_waited_for(exchange: Exchange) -> bool:
    """Whether somebody waits for results of this exchange."""
    return id(exchange) in _waited


def is_anyone_waiting() -> bool:
    """Whether somebody waits for results of any exchange."""
    return bool(_waited)


def _run(exchange: Exchange, steps: Generator[bool, None, None]) -> None:
    global _last_look
    idle, since = 0, time.monotonic()
    room = exchange.room
    poll = CROWDED_POLL_SECONDS if exchange.is_crowded else POLL_SECONDS
    pause, patience = (os.sched_yield, NEAR_LOOKS) if exchange.is_near else (_nap, LOOKS)
    heard = 0 if room is None else room.heard()
    for moved in steps:
        _last_look = now = time.monotonic()
        if moved or (len(_active) > 1 and drive_others(exchange, now - since > IMPATIENT_SECONDS)):
            idle, since = 0, now
        else:
            idle += 1
            # Pause shortly at first, in case the answer is near; then sleep, so that the kernels of the other ranks and
            # Horovod's own thread get the cores.
            if idle < patience and not (room is not None and exchange.waits_nearby):
                pause()
            elif room is None:
                time.sleep(poll)
            else:
                room.rest(heard, poll)
        if room is not None:
            heard = room.heard()  # before the next look


def _nap() -> None:
    """For as short a time as the system can: some 50 microseconds."""
    time.sleep(0)


def drive_others(exchange: Exchange | None, impatient: bool) -> bool:
    """Move all exchanges on but the one whose caller waits for it."""
    moved = False
    for other in list(_active.values()):
        if other is not exchange:
            moved |= other.drive(impatient, launch=exchange is not None or other.any_thread)
    return moved


_pid = 0


def _start_thread() -> None:
    global _thread, _pid
    _pid = os.getpid()
    _thread = threading.Thread(target=_look_now_and_then, name="horovod_aps progress", daemon=True)
    _thread.start()


def _look_now_and_then() -> None:
    since = time.monotonic()
    while True:
        _awake.wait()
        time.sleep(THREAD_SECONDS)
        now = time.monotonic()
        if now - _last_look < ALONE_SECONDS:
            continue
        if drive_others(None, now - since > IMPATIENT_SECONDS):
            since = now
        with _lock:
            if not _active:  # a step takes the interpreter less often if the thread is not woken for each
                _awake.clear()
