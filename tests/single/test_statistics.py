"""Figures that one thread asks for while another one counts."""

from __future__ import annotations

import threading

import numpy as np

from horovod_aps.engine.layout import LayerSpec
from horovod_aps.engine.statistics import Statistics
from horovod_aps.formats import FloatFormat

BUCKETS = [[LayerSpec(f"{bucket}.{i}", (8,), 0, FloatFormat(4, 3)) for i in range(3)] for bucket in range(2)]


def test_nothing_is_lost_that_is_counted_in_between(monkeypatch):
    statistics, threads = Statistics(), []
    entry_of = Statistics._entry

    def count_too(self, spec, exponent):
        if not threads:
            threads.append(threading.Thread(target=statistics.count, args=(BUCKETS[1], np.zeros(3, np.int64))))
            threads[0].start()
            threads[0].join(0.2)
        return entry_of(self, spec, exponent)

    monkeypatch.setattr(Statistics, "_entry", count_too)
    statistics.count(BUCKETS[0], np.zeros(3, np.int64))
    assert list(statistics.as_dict()["layers"]) == ["0.0", "0.1", "0.2"]
    threads[0].join()
    counts = {name: one["n_exchanges"] for name, one in statistics.as_dict()["layers"].items()}
    assert counts == {f"{bucket}.{i}": 1 for bucket in range(2) for i in range(3)}
