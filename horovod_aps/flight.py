"""A batch on its way: its plan, the buffers of its buckets, and the jobs that carry them through the phases.

The bookkeeping of `exchange`; nothing here touches a value or a network.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from horovod_aps import agreement
from horovod_aps.kernels import ITEM_SIZES
from horovod_aps.layout import BucketLayout, LayerSpec, plan_buckets
from horovod_aps.options import Options
from horovod_aps.transport import Request

POLL_SECONDS = 50e-6  # between looks at the network while there is nothing else to do

Steps = Generator[Request, None, None]


@dataclass(slots=True)
class Layer:
    """One gradient handed to the exchange: where it is, and where its result goes."""

    name: str
    shape: tuple[int, ...]
    dtype: int
    source: int
    target: int
    factor: float
    keep: Any = None
    """Holds the memory behind `source` and `target` alive."""
    label: str = ""
    """What people call it, in overrides and statistics, if not by its name; ranks need not agree on that."""

    @property
    def shown(self) -> str:
        """The name for people."""
        return self.label or self.name


class Plan:
    """A batch whose make-up all ranks share: layer specs in bucket order, layouts, and reusable buffers."""

    def __init__(self, specs: Sequence[LayerSpec], description: str, size: int, options: Options,
                 warm: bool) -> None:
        self.specs = list(specs)
        self.options, self.warm = options, warm
        self.make_up = {spec.name: (spec.shape, spec.dtype, spec.factor) for spec in self.specs}
        self.words = agreement.digest_words(description)
        self.buckets = plan_buckets(self.specs, size, options.bucket_mb)
        self.bucket_of = {self.specs[layer].name: i for i, b in enumerate(self.buckets) for layer in b.layers}
        self.buffers: list[Buffers | None] = [None] * len(self.buckets)


class Buffers:
    """Messages and segment tables of one bucket, made once and reused by every exchange of it."""

    def __init__(self, kernels: Any, bucket: BucketLayout, rank: int, size: int) -> None:
        self.table = bucket.segments.copy()
        self.item_offsets = self.table["first"] * np.array(ITEM_SIZES)[self.table["dtype"]]
        self.residual_offsets = self.table["first"] * 4
        n_bytes = int(bucket.shard_bytes[-1])
        self.send = kernels.alloc(n_bytes)
        if bucket.n_shards == 1:
            self.recv = kernels.alloc(n_bytes * (size - 1))
            self.parts = bucket.parts()
            return
        self.mine = bucket.shard_table(rank)
        self.scratch: Any = None  # the unrounded sums, for error feedback
        self.n_payload = int(bucket.shard_bytes[rank + 1] - bucket.shard_bytes[rank])
        self.recv = kernels.alloc(self.n_payload * size)
        self.sums = kernels.alloc(int(bucket.gather_bytes[rank + 1] - bucket.gather_bytes[rank]))
        self.gathered = kernels.alloc(int(bucket.gather_bytes[-1]) - len(self.sums))


@dataclass
class Flight:
    """A planned batch on its way: which layers have arrived, and the jobs of its launched buckets."""

    plan: Plan
    missing: list[int] = field(init=False)  # layers that are still missing, by bucket
    layers: dict[str, Layer] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    n_launched: int = 0
    n_agreed: int = 0
    n_headers: int = 1
    broken: bool = False
    next_look: float = 0.0

    def __post_init__(self) -> None:
        self.missing = [len(bucket.layers) for bucket in self.plan.buckets]

    @classmethod
    def of(cls, plan: Plan, layers: Iterable[Layer]) -> Flight:
        """A flight with layers on board."""
        flight = cls(plan)
        for layer in layers:
            flight.arrive(layer)
        return flight

    def arrive(self, layer: Layer) -> bool:
        """Note a layer that is as planned; True if it was the last of its bucket."""
        if self.plan.make_up.get(layer.name) != (layer.shape, layer.dtype, layer.factor):
            return False
        bucket = self.plan.bucket_of[layer.name]
        self.layers[layer.name] = layer
        self.missing[bucket] -= 1
        return self.missing[bucket] == 0

    def agreed_names(self) -> set[str]:
        """Layers of the buckets that were launched and agreed on; buckets are agreed on in order."""
        return {self.plan.specs[i].name for bucket in self.plan.buckets[:self.n_agreed] for i in bucket.layers}


class Job:
    """One bucket going through the phases; `step` moves it on when what it waits for is done."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._request: Request | None = next(steps)

    @property
    def finished(self) -> bool:
        return self._request is None

    def step(self) -> bool:
        """Advance as far as possible; True if anything moved."""
        moved = False
        while self._request is not None and self._request.done():
            self._request = next(self._steps, None)
            moved = True
        return moved
