"""transport="allreduce" for PyTorch: exponents by a MAX all-reduce, rounded values by one in float16."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

from horovod_aps import carrier
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.seeds import stochastic_seed
from horovod_aps.engine.statistics import Statistics
from horovod_aps.kernels import FLOAT16, FLOAT32, ITEM_SIZES, Bytes, CpuKernels, Table
from horovod_aps.options import Options
from horovod_aps.torch.ticket import PACKED, Ticket

VALUE_DTYPES = {FLOAT16: torch.float16, FLOAT32: torch.float32}

PATIENCE_SECONDS = 0.2  # without any movement, after which what is not wanted may stay behind
POLL_SECONDS = 50e-6
_all: weakref.WeakSet[CarrierBatch] = weakref.WeakSet()


@dataclass(eq=False)
class CarriedGroup:
    """Tensors that were handed in together, whose exponents are on their way."""

    layers: Sequence[Layer]
    sources: list[torch.Tensor]
    words: torch.Tensor
    handle: int


class CarrierBatch:
    """Tensors that wait for `flush`, which sends the exponents of all of them, then their values.

    Nothing is sent before: ranks with other options would leave operations behind that nobody answers.
    """

    def __init__(self, name: str, process_set: Any, options: Options, statistics: Statistics) -> None:
        self._statistics = statistics
        self._name, self._process_set, self.options = name, process_set, options
        self._kernels = CpuKernels()
        self.members = tuple(process_set.ranks)
        self._place = carrier.carrier_place(options, len(self.members), mpi_ops.gloo_enabled())
        self._waiting: list[Sequence[Layer]] = []
        self._tickets: list[Ticket] = []
        self._groups: list[CarriedGroup] = []  # whose exponents are on their way
        self._values: list[tuple[Layer, int, int]] = []  # layers whose values are, with exponent word and handle
        self.step_number = 0
        _all.add(self)

    def submit(self, layers: Sequence[Layer], ticket: Ticket) -> None:
        """Note one tensor or group, which must not start before the ticket is over."""
        self._waiting.append(layers)
        if ticket not in self._tickets:
            self._tickets.append(ticket)

    def flush(self, wanted: Sequence[Layer]) -> None:
        """All-reduce everything submitted, until these layers have their results.

        Waits for the others as well as long as anything moves: what starts here must not depend on chance, since
        Horovod counts operations. A tensor that another rank has not begun stays behind. All other carriers of the
        process move on meanwhile, for ranks may take results in another order.
        """
        for one in list(_all):
            if one is self or one._is_expected():
                one._start()
        since = time.monotonic()
        while True:
            if any([one._advance() for one in list(_all)]):
                since = time.monotonic()
            is_done = all(layer.done for layer in wanted)
            if is_done and (not (self._groups or self._values) or time.monotonic() - since > PATIENCE_SECONDS):
                return
            time.sleep(POLL_SECONDS)

    def _is_expected(self) -> bool:
        """Whether all ranks are known to be there with the same transport."""
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_over() or ticket.word(PACKED)]
        return not self._tickets

    def forget(self) -> None:
        """Drop what was submitted: not all ranks are there, or they mean something else."""
        self._waiting, self._tickets = [], []

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.step_number += 1
            self._groups += [self._start_exponents(layers) for layers in waiting]

    def _advance(self) -> bool:
        """Send values whose exponents are known, and hand over results that have come; True if there were any."""
        moved = False
        for group in [group for group in self._groups if mpi_ops.poll(group.handle)]:
            self._groups.remove(group)
            mpi_ops.synchronize(group.handle)
            carrier.check_option_words(group.words[-2:].tolist(), self.options)
            seed = stochastic_seed(self.options, self.step_number - 1, self._process_set.rank())
            self._values += [
                (layer, word, self._start_values(layer, source, word, seed))
                for layer, source, word in zip(group.layers, group.sources, group.words.tolist())
            ]
            moved = True
        for entry in [entry for entry in self._values if mpi_ops.poll(entry[2])]:
            self._values.remove(entry)
            self._finish(*entry)
            moved = True
        return moved

    def _finish(self, layer: Layer, word: int, handle: int) -> None:
        total = mpi_ops.synchronize(handle)
        power, finite = carrier.back_scale(word, self._place)
        # float64 holds every sum times every power of two that occurs, so this rounds once
        scaled = torch.ldexp(total.double(), torch.tensor(power)) * layer.factor
        target = layer.keep.result
        target.copy_((scaled if finite else torch.full_like(scaled, torch.nan)).view(target.shape))
        layer.done = True

    def _start_exponents(self, layers: Sequence[Layer]) -> CarriedGroup:
        """CUDA tensors go by the host."""
        sources = [layer.keep.staged.cpu() for layer in layers]
        words = [
            carrier.exponent_word(self._kernels, source.data_ptr(), source.numel(), layer.dtype, self.options)
            for layer, source in zip(layers, sources)
        ]
        words += carrier.option_words(self.options, [layer.factor for layer in layers])
        shared = torch.tensor(words, dtype=torch.int32)
        handle = mpi_ops.allreduce_async_(
            shared, op=mpi_ops.Max, name=f"{self._name}.exponent.{layers[0].name}", process_set=self._process_set
        )
        return CarriedGroup(layers, sources, shared, handle)

    def _account(self, name: str) -> Callable[[Table, Bytes, int], None]:
        """Counts a tensor that has just been rounded."""
        return lambda segment, message, exponent: self._statistics.add_carried(
            name,
            self._kernels,
            segment,
            message,
            exponent,
            ITEM_SIZES[self._place.dtype],
            self.options,
            len(self.members),
            self.step_number,
        )

    def _start_values(self, layer: Layer, source: torch.Tensor, word: int, seed: int | None) -> int:
        values = torch.empty(source.numel(), dtype=VALUE_DTYPES[self._place.dtype])
        carrier.fill_carrier(
            self._kernels,
            source.data_ptr(),
            source.numel(),
            layer.dtype,
            values.data_ptr(),
            word,
            self._place,
            self.options,
            seed,
            self._account(layer.shown),
        )
        handle: int = mpi_ops.allreduce_async_(
            values, op=mpi_ops.Sum, name=f"{self._name}.value.{layer.name}", process_set=self._process_set
        )
        return handle
