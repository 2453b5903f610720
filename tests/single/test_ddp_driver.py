"""The thread that moves DDP's exchange on: what it keeps, and when it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch.futures import Future

from horovod_aps.ddp.driver import Driver, Part, Place, Step
from horovod_aps.ddp.hook import _finish
from horovod_aps.ddp.state import APSState
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.errors import LostPeer, OutOfSharedMemory, cannot_go_on, failure_of
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

SECONDS = 20.0


def new_driver() -> Driver:
    return Driver(Exchange(CpuKernels(), LocalTransport.world(1)[0], Options(4, 3)), Place(torch.device("cpu")))


def run_step(driver: Driver) -> weakref.ref[Layer]:
    """A step of one bucket; returns its layer, which holds the bucket's memory."""
    buffer = torch.ones(1000)
    layer = Layer("w", (1000,), 0, buffer.data_ptr(), buffer.data_ptr(), 1.0, buffer)
    driver.hand_in(Part([layer], buffer, Future(), lambda: None))
    step = driver.close_step()
    assert step is not None and step.over.wait(SECONDS) and step.error is None
    return weakref.ref(layer)


def test_driver_does_not_keep_the_buckets_of_the_last_step():
    """DDP makes new ones for the second step, and has the first ones' memory to itself."""
    driver = new_driver()
    layer = run_step(driver)
    until = time.monotonic() + SECONDS
    while layer() is not None and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert layer() is None
    driver.end()


def test_drivers_of_an_earlier_group_end(monkeypatch):
    state, device = APSState(4, 3), torch.device("cpu")
    threads = []
    for _ in range(3):
        state._find_group([])  # a group that it does not know yet
        driver = state._drivers[device] = new_driver()
        run_step(driver)
        threads.append(driver._thread)
        state._process_group = object()
    state._find_group([])
    assert not state._drivers and not any(thread.is_alive() for thread in threads)
    assert not [thread for thread in threading.enumerate() if thread in threads]


def test_lack_of_shared_memory_is_a_memory_error_of_the_step():
    """As with Horovod; a lost peer stays what it is."""
    step = Step()
    for error, kind in (
        (cannot_go_on("rank 1", failure_of(OutOfSharedMemory(10, 2, "none left")).encode()), MemoryError),
        (cannot_go_on("rank 1", b"MemoryError: none left"), LostPeer),
    ):
        step.end(error)
        with pytest.raises(kind, match="rank 1 could not go on: .*none left") as caught:
            _finish(APSState(4, 3), [step])
        assert caught.type is kind
