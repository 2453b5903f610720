"""What follows the end of an object happens outside of the garbage collector, and not later than the process's end."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from horovod_aps import cleanup
from horovod_aps.engine import progress
from horovod_aps.engine.exchange import Exchange
from horovod_aps.frontends.compressor import ByBits
from horovod_aps.frontends.reducer import ReducerKey
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.transports.local import LocalTransport

SECONDS = 20.0


class Owner:
    def __init__(self) -> None:
        self.itself = self  # only the collector finds it


class Ending(LocalTransport):
    """Says when it is closed."""

    def close(self) -> None:
        self.closed.set()


def test_compressor_collected_while_a_lock_is_held_closes_its_exchange_later():
    """As in a training script: the collector runs while an exchange is added, with `progress`'s lock held."""
    closed = threading.Event()
    compressor = ByBits(4, 3)
    compressor.itself = compressor  # only the collector finds it
    transport = Ending.world(1)[0]
    transport.closed = closed
    compressor._keep(ReducerKey(0, "cpu", (0,)), Exchange(CpuKernels(), transport, Options(4, 3)))

    def collect() -> None:
        with progress._lock:
            gc.collect()

    del compressor
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "the collector waits for the lock"
    assert closed.wait(SECONDS)


def test_one_that_fails_is_logged_and_others_follow(caplog):
    called = threading.Event()
    for function in (lambda: 1 // 0, called.set):
        cleanup.after(Owner(), function)
        gc.collect()
    assert called.wait(SECONDS)
    assert "ZeroDivisionError" in caplog.text


def test_calls_do_not_wait_for_the_owner_of_another():
    called = threading.Event()
    stays = Owner()
    cleanup.after(stays, lambda: pytest.fail("called too early"))
    cleanup.after(Owner(), called.set)
    gc.collect()
    assert called.wait(SECONDS)
    time.sleep(0.05)
    cleanup._finalizers[-2].detach()


def test_end_of_the_process_calls_what_is_left_once():
    script = """
    from horovod_aps import cleanup
    class Owner: pass
    stays, goes = Owner(), Owner()
    for owner, word in ((stays, "stayed"), (goes, "went")):
        for number in (1, 2):
            cleanup.after(owner, lambda word=word, number=number: print(word, number, flush=True))
    del goes, owner
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert sorted(lines) == ["stayed 1", "stayed 2", "went 1", "went 2"], done
    assert lines.index("stayed 2") < lines.index("stayed 1") and lines.index("went 2") < lines.index("went 1"), done


def test_forked_child_calls_only_what_it_has_asked_for():
    script = """
    import os, time
    from horovod_aps import cleanup
    class Owner: pass
    owner = Owner()
    cleanup.after(owner, lambda: print("parent" if os.getpid() == parent else "wrong", flush=True))
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        del owner
        mine = Owner()
        cleanup.after(mine, lambda: print("child", flush=True))
        raise SystemExit
    os.waitpid(child, 0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["child", "parent"], done


def test_exchanges_of_earlier_worlds_are_not_kept():
    """After every `hvd.init()` there are new ones; the last one's residuals wait for its successor."""
    compressor = ByBits(4, 3, error_feedback=True)
    seen = []
    for _ in range(4):
        exchange = Exchange(CpuKernels(), LocalTransport.world(1)[0], Options(4, 3))
        seen.append(weakref.ref(compressor._keep(ReducerKey(0, "cpu", (0,)), exchange)))
        del exchange
        compressor._retire_all()
    gc.collect()
    assert [one() is not None for one in seen] == [False, False, False, True]


def test_threads_and_finalizers_do_not_pile_up():
    for _ in range(100):
        cleanup.after(Owner(), os.getpid)
    gc.collect()
    cleanup.after(Owner(), os.getpid)
    assert len(cleanup._finalizers) < 50
    assert sum(thread.name == "horovod_aps cleanup" for thread in threading.enumerate()) == 1
