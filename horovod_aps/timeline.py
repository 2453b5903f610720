"""The phases of every exchange, for people: trace lines at HOROVOD_APS_LOG=debug, and a timeline file.

Horovod's own timeline knows only Horovod's operations and has no way in for others, so with
HOROVOD_APS_TIMELINE every rank writes a file of the same kind (Chrome trace, its start in the first event),
and `horovod-aps timeline` (tools/timeline.py) puts such files and Horovod's on one time axis.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from horovod_aps import config

PID_BASE = 1_000_000  # Horovod's timeline numbers tensors from 0 as "processes"; ours come after all of them
logger = logging.getLogger("horovod_aps")  # set up by `log`, which the exchange imports
START_KEY = "start_time_since_epoch_in_micros"  # as in Horovod's files


class TimelineFile:
    """A Chrome trace that is valid JSON after every event, so that a killed rank leaves a readable one."""

    def __init__(self, path: Path) -> None:
        rank = config.launcher_rank() or "0"
        self._pid = PID_BASE + int(rank)
        self._start = time.perf_counter_ns()
        self._lock = threading.Lock()
        self._file: BinaryIO = open(path, "wb", buffering=0)
        self._file.write(b"[]")
        self._events = 0
        epoch, name = {START_KEY: time.time_ns() // 1000}, {"name": f"horovod_aps rank {rank}"}
        for pid, args in ((PID_BASE - 1, epoch), (self._pid, name)):
            self._append({"ph": "M", "name": "process_name", "pid": pid, "args": args})

    def add(self, name: str, bucket: int, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """Write one finished phase; `begin_ns` and `end_ns` are of `time.perf_counter_ns`."""
        self._append(
            {
                "ph": "X",
                "name": name,
                "pid": self._pid,
                "tid": bucket,
                "ts": (begin_ns - self._start) / 1000,
                "dur": (end_ns - begin_ns) / 1000,
                "args": args,
            }
        )

    def _append(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._file.seek(-1, os.SEEK_END)  # over the closing bracket
            self._file.write((",\n" if self._events else "\n").encode() + json.dumps(event).encode() + b"]")
            self._events += 1


class Phases:
    """The phases of one bucket: calling it ends the phase before and begins the next."""

    def __init__(self, step: int, bucket: int, n_layers: int, file: TimelineFile | None) -> None:
        self._step, self._bucket, self._n_layers, self._file = step, bucket, n_layers, file
        self._name, self._begin, self._n_bytes = "", 0, 0

    def __call__(self, name: str, n_bytes: int = 0) -> None:
        """Begin the phase `name`, in which this rank sends `n_bytes`."""
        self.end()
        logger.debug(
            "step %d bucket %d (%d layers): %s, %d bytes", self._step, self._bucket, self._n_layers, name, n_bytes
        )
        self._name, self._begin, self._n_bytes = name, time.perf_counter_ns(), n_bytes

    def end(self) -> None:
        """End the phase under way, if any."""
        if self._name and self._file is not None:
            self._file.add(
                self._name,
                self._bucket,
                self._begin,
                time.perf_counter_ns(),
                {"step": self._step, "layers": self._n_layers, "bytes": self._n_bytes},
            )
        self._name = ""


class _NoPhases(Phases):
    """What nobody looks at costs two calls."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, None)

    def __call__(self, name: str, n_bytes: int = 0) -> None:
        pass

    def end(self) -> None:
        pass


_NONE = _NoPhases()
_file: TimelineFile | None = None
_opened: Path | None = None
_lock = threading.Lock()


def phases(step: int, bucket: int, n_layers: int) -> Phases:
    """The recorder of one bucket's phases; does nothing unless a log or a timeline is asked for."""
    file = _timeline()
    if file is None and not logger.isEnabledFor(logging.DEBUG):
        return _NONE
    return Phases(step, bucket, n_layers, file)


def _timeline() -> TimelineFile | None:
    """The file that HOROVOD_APS_TIMELINE asks for; a rank that changed (elastic) starts another."""
    global _file, _opened
    path = config.timeline_file()
    if path != _opened:
        with _lock:
            if path != _opened:
                _file = None if path is None else TimelineFile(path)
                _opened = path
    return _file
