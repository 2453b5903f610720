"""What is to be done once an object has gone, outside of the garbage collector.

The collector runs in the middle of anything, in any thread and with any lock held: what it calls must take no lock and
wait for nothing. So it only notes what is to be done, and a thread does it, one after the other. The process ends when
all is done.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from horovod_aps.log import logger

END_SECONDS = 15.0  # that all of it may take at the end of the process
# Its put() may come in the middle of another one, by design; None is the end.
_due: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
_finalizers: list[weakref.finalize] = []
_thread: threading.Thread | None = None
_lock = threading.Lock()  # of the list and the thread; never taken by what the collector calls


def after(owner: object, function: Callable[[], Any]) -> None:
    """Call the function, which must not know the owner, soon after the owner has gone, or when the process ends.

    It is not called in the garbage collector, and so may take locks. A forked child calls only what it has asked for.
    """
    global _thread
    finalizer = weakref.finalize(owner, _due.put, function)
    finalizer.atexit = False
    with _lock:
        _finalizers[:] = [one for one in _finalizers if one.alive] + [finalizer]
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_work, name="horovod_aps cleanup", daemon=True)
            _thread.start()


def _work() -> None:
    while (function := _due.get()) is not None:
        try:
            function()
        except Exception:
            logger.exception("cleaning up after an object that has gone")
        del function  # while it waits for the next one


@atexit.register
def _end() -> None:
    """The owners that are still there go with the process; as when they go by themselves, what came last goes first."""
    for finalizer in reversed(_finalizers):
        found = finalizer.detach()
        if found is not None:
            _due.put(found[2][0])
    if _thread is not None:
        _due.put(None)
        _thread.join(END_SECONDS)


def _forget() -> None:
    """A forked child: all of it is its parent's, and the lock may be held by a thread that is not here."""
    global _due, _finalizers, _thread, _lock
    for finalizer in _finalizers:
        finalizer.detach()
    _due, _finalizers, _thread, _lock = SimpleQueue(), [], None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
