"""PackedState and APSState: the options of the hook, and what it keeps from step to step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from horovod_aps import cleanup
from horovod_aps.ddp.driver import Driver, Part, Place, Step
from horovod_aps.ddp.names import Names, models_with
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.formats import Format
from horovod_aps.frontends.compressor import BaseCompressor, ByBits
from horovod_aps.frontends.group import join
from horovod_aps.frontends.reducer import ReducerKey
from horovod_aps.frontends.tensors import DTYPE_CODES, with_tensors
from horovod_aps.kernels import for_torch


class PackedState(BaseCompressor):
    """State of `aps_hook`, one per model: `model.register_comm_hook(PackedState("e4m3"), aps_hook)`.

    With two ranks every value is rounded once, with more of them twice; in two levels (`hierarchy`)
    hosts count instead of ranks. The sum is formed in float32 and averaged. All ranks get the same bits. A layer in
    which any rank has NaN or Inf becomes NaN as a whole, on all ranks. A step that fails raises on every rank, a
    ValueError if ranks have different options; its gradients are not to be used.

    `torch.save` keeps options, residuals and the position in schedules, and no process group.
    """

    _who = "PackedState"

    def __init__(
        self,
        format: Format | str,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        **options: Any,
    ) -> None:
        """As `horovod_aps.torch.PackedCompressor`, whose options these are.

        Args:
            format: one of `horovod_aps.formats`, or its text, such as "e4m3".
            process_group: the ranks to average over; the model's by default.
            named_parameters: names for overrides and statistics; the model's own by default.
            options: those of PackedCompressor. Layers are called as in `model.module.named_parameters()`.
        """
        self._check_transport(options)
        super().__init__(format, **options)
        self._give(process_group, named_parameters)

    def _check_transport(self, options: dict[str, Any]) -> None:
        if options.get("transport", "packed") != "packed":
            raise ValueError(
                f'{type(self).__name__}: transport must be "packed", got {options["transport"]!r}; ranks may leave by '
                f"Join with it"
            )

    def _give(
        self, process_group: dist.ProcessGroup | None, named_parameters: Iterable[tuple[str, Tensor]] | None
    ) -> None:
        self._process_group: Any = process_group  # that the user has given
        self._names: Names | None = None if named_parameters is None else Names(named_parameters, given=True)

    def _start(self) -> None:
        super()._start()
        self._process_group, self._names = None, None
        self._group: Any = None  # in use
        self._drivers: dict[torch.device, Driver] = {}
        self._order = Order()

    def state_dict(self) -> dict[str, Any]:
        """As of `APSCompressor`: each rank saves its own, for residuals differ."""
        return with_tensors(super().state_dict())

    # ---- for the hook -------------------------------------------------------------------------------------

    def group_of(self, bucket: dist.GradBucket) -> Any:
        """The process group to average a bucket over."""
        if bucket.index() == 0 or self._group is None:
            self._find_group(bucket.parameters())
        return self._group

    def _find_group(self, parameters: Sequence[Tensor]) -> None:
        """Know the model that these are parameters of, and its group; after a restart both may be others."""
        if self._names is not None and self._names.know(parameters) and _is_alive(self._group):
            return
        models = [model for model in models_with(self) if _is_alive(model.process_group)]
        if len({id(model.module) for model in models}) > 1:
            raise ValueError(f"APSState: {len(models)} models were registered with this state; make one for each")
        if self._names is None or not self._names.given:
            self._names = Names.of_model(models[-1]) if models else Names(())
        found = self._process_group or (models[-1].process_group if models else dist.group.WORLD)
        if found is not self._group:
            self._group = found
            _end(self._drivers)
            self._drivers.clear()
            self._retire_all()

    def hand_in(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Take the gradients of a bucket; the future has them averaged. Never blocks."""
        assert self._names is not None
        buffer, names = bucket.buffer(), self._names.of(bucket.parameters())
        driver = self._drivers.get(buffer.device) or self._new_driver(buffer.device)
        factor = 1.0 / dist.get_world_size(self._group)
        layers = [
            Layer(name, shape, DTYPE_CODES[buffer.dtype], address, address, factor, buffer)
            for name, (shape, address) in zip(names, _places(bucket))
        ]
        if self._order.is_new(bucket.index(), names):
            for one in self._drivers.values():
                one.exchange.forget_plans()
        if self._order.is_initial and self._names.are_as_in_model(names):
            layers.reverse()  # most often as backward comes to them, which later buckets show
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.device.type == "cuda" else [])
        driver.hand_in(Part(layers, buffer, future, driver.place.arrival(buffer)))
        return future

    def close_step(self) -> list[Step]:
        """The last bucket has been handed in; returns what must be waited for."""
        self._order.end_step()
        steps = [driver.close_step() for driver in self._drivers.values()]
        return [step for step in steps if step is not None]

    def after_step(self) -> None:
        """All of a step has its results."""
        for reducer in self._reducers.values():
            self._look_for_idle_overrides(reducer)

    def _new_driver(self, device: torch.device) -> Driver:
        place = Place(device)
        exchange = Exchange(
            for_torch.kernels_for(device), None, self._options, partial(for_torch.on, device), overlap=True
        )
        members = join(exchange, self._group, device, self._options.why_flat)
        self._keep(ReducerKey(0, str(device), members), exchange)
        if not self._drivers:
            cleanup.after(self, partial(_end, self._drivers))
        driver = self._drivers[device] = Driver(exchange, place)
        return driver


class APSState(ByBits, PackedState):
    """`PackedState(FloatFormat(e, m))`: `model.register_comm_hook(APSState(e=4, m=3), aps_hook)`.

    All that is said of `PackedState` holds.
    """

    _who = "APSState"

    def __init__(
        self,
        e: int,
        m: int,
        process_group: dist.ProcessGroup | None = None,
        *,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        **options: Any,
    ) -> None:
        """As `horovod_aps.torch.APSCompressor`, whose options these are.

        Args:
            e: exponent bits, 1..8.
            m: mantissa bits, 0..23. 1+e+m bits per element are sent.
            process_group: the ranks to average over; the model's by default.
            named_parameters: names for overrides and statistics; the model's own by default.
            options: those of APSCompressor. Layers are called as in `model.module.named_parameters()`.
        """
        self._check_transport(options)
        ByBits.__init__(self, e, m, **options)
        self._give(process_group, named_parameters)


def _end(drivers: dict[torch.device, Driver]) -> None:
    for driver in list(drivers.values()):
        driver.end()


def _places(bucket: dist.GradBucket) -> list[tuple[tuple[int, ...], int]]:
    """Shapes and addresses of a bucket's gradients.

    DDP hands over complex ones as twice as many real numbers, and tells of only one half of them.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    if not parameters[0].is_complex():
        return [(tuple(grad.shape), grad.data_ptr()) for grad in bucket.gradients()]
    sizes = [2 * parameter.numel() * buffer.element_size() for parameter in parameters]
    starts = itertools.accumulate([0, *sizes[:-1]])
    return [((*one.shape, 2), buffer.data_ptr() + start) for one, start in zip(parameters, starts)]


def _is_alive(group: Any) -> bool:
    """Whether torch.distributed knows the process group still."""
    if group is None:
        return False
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


class Order:
    """In which order gradients come, and when that has changed: DDP makes other buckets after the first step.

    It does so in the same way on all ranks. Before, buckets have the order of the model's parameters.
    """

    def __init__(self) -> None:
        self.is_initial = True
        """Whether buckets are as DDP has first made them."""
        self._first: dict[int, list[str]] = {}
        self._last: list[str] = []
        self._now: list[str] = []
        self._is_anew = self._changed_late = False

    def is_new(self, index: int, names: list[str]) -> bool:
        """Note a bucket; True, with the first one of a step, if plans for another order are of no use."""
        if self._first.setdefault(index, names) != names:
            self.is_initial = False
        place = len(self._now)
        self._now += names
        differs = bool(self._last) and self._last[place : len(self._now)] != names
        if place:
            self._changed_late |= differs and not self._is_anew
            return False
        self._is_anew, self._changed_late = differs or self._changed_late, False
        return self._is_anew

    def end_step(self) -> None:
        self._last, self._now = self._now, []
