"""A batch whose make-up all ranks know (`Plan`), and one on its way (`Flight`): bookkeeping only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from horovod_aps.engine import agreement
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import LayerSpec
from horovod_aps.engine.reductions import ChooseReduction, plan_reductions
from horovod_aps.engine.reductions.base import Steps, Work
from horovod_aps.kernels import DONE
from horovod_aps.options import Options
from horovod_aps.transports.base import Request, Transport
from horovod_aps.transports.hosts import Hosts
from horovod_aps.transports.memory import Until

_NOWHERE = (None, 0, 0)


class Plan:
    """A batch whose make-up all ranks share: layer specs in bucket order, layouts, and how each bucket is reduced."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        description: str,
        transport: Transport,
        options: Options,
        warm: bool,
        choose_reduction: ChooseReduction | None = None,
    ) -> None:
        self.specs = list(specs)
        self.options, self.warm = options, warm
        self.digest = agreement.digest(description)
        self.buckets, self.reductions = plan_reductions(self.specs, options.bucket_mb, transport, choose_reduction)
        self.specs_of = [[self.specs[layer] for layer in bucket.layers] for bucket in self.buckets]
        self.names_of = [[spec.name for spec in specs] for specs in self.specs_of]
        self.n_elements_of = [sum(spec.n_elements for spec in specs) for specs in self.specs_of]
        self.places = {
            spec.name: (spec.shape, spec.dtype, bucket) for bucket, specs in enumerate(self.specs_of) for spec in specs
        }
        """Of all layers by name: shape, dtype, and number of the bucket."""


class Job:
    """One agreed bucket going through its reduction; `step` moves it on when what it waits for is done."""

    def __init__(self, work: Work, steps: Steps) -> None:
        self.work, self._steps = work, steps
        self._request: Request | None = DONE

    @property
    def finished(self) -> bool:
        return self._request is None

    @property
    def waits_nearby(self) -> bool:
        """Whether it waits for ranks of this host, and not for the network."""
        return isinstance(self._request, Until)

    @property
    def memory(self) -> Any:
        """All that the network may still write into or read from, if it is given up and kernels are quiet."""
        return self.work.lease.buffers, getattr(self._request, "memory", self._request)

    def behind(self, hosts: Hosts | None) -> set[int]:
        """The ranks of this host that it waits for."""
        if hosts is None or not isinstance(self._request, Until):
            return set()
        return {hosts.ranks[hosts.host][place] for place in self._request.behind()}

    def step(self) -> bool:
        """Advance as far as possible; True if anything moved."""
        moved = False
        while self._request is not None and self._request.done():
            self._request = next(self._steps, None)
            moved = True
        return moved


@dataclass
class Flight:
    """A planned batch on its way: which layers have arrived, and the buckets that have been started."""

    plan: Plan
    missing: list[int] = field(init=False)  # layers that are still missing, by bucket
    layers: dict[str, Layer] = field(default_factory=dict)
    works: list[Work] = field(default_factory=list)  # of the buckets whose exponents are known or being found
    n_said: int = 0
    """Buckets whose headers have been sent."""
    n_agreed: int = 0

    def __post_init__(self) -> None:
        self.missing = [len(bucket.layers) for bucket in self.plan.buckets]

    @classmethod
    def of(cls, plan: Plan, layers: Mapping[str, Layer]) -> Flight:
        """A flight with layers on board."""
        flight = cls(plan)
        flight.arrive(layers)
        return flight

    def arrive(self, layers: Mapping[str, Layer]) -> None:
        """Note the layers, by name, that are as planned."""
        places, there, missing = self.plan.places, self.layers, self.missing
        for name, layer in layers.items():
            shape, dtype, bucket = places.get(name, _NOWHERE)
            if shape == layer.shape and dtype == layer.dtype_code and name not in there:
                there[name] = layer
                missing[bucket] -= 1

    def may_start(self, n_more: int) -> bool:
        """Whether there is anything to do for it with so many more layers."""
        return len(self.works) > 0 or n_more >= next(iter(self.missing), 0)

    @property
    def next_is_full(self) -> bool:
        """Whether there is a bucket to start, and all its layers are there."""
        index = len(self.works)
        return index < len(self.missing) and self.missing[index] == 0

    @property
    def is_launched(self) -> bool:
        """Whether the headers of all buckets have been sent, or soon will be."""
        return len(self.works) == len(self.missing)

    @property
    def is_scanning(self) -> bool:
        """Whether the exponents of a bucket are being found."""
        return self.n_said < len(self.works)

    @property
    def is_agreed(self) -> bool:
        """Whether all buckets have been agreed on."""
        return self.n_agreed == len(self.missing)

    def layers_of(self, index: int) -> list[Layer]:
        """The layers of one bucket, in its order."""
        return list(map(self.layers.__getitem__, self.plan.names_of[index]))
