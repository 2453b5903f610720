"""transport="allreduce" for PyTorch: exponents by a MAX all-reduce, rounded values by one in float16."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

from horovod_aps.engine.layer import Layer
from horovod_aps.engine.seeds import stochastic_seed
from horovod_aps.frontends.carrier import Carrier, Terms, back_scale, check_option_words
from horovod_aps.kernels import FLOAT16, FLOAT32
from horovod_aps.options import Options
from horovod_aps.torch.gradient import Gradient
from horovod_aps.torch.ticket import PACKED, Ticket

VALUE_DTYPES = {FLOAT16: torch.float16, FLOAT32: torch.float32}

PATIENCE_SECONDS = 0.2  # without any movement, after which what is not wanted may stay behind
POLL_SECONDS = 50e-6
_all: weakref.WeakSet[TorchCarrier] = weakref.WeakSet()


@dataclass(eq=False)
class _Exponents:
    """Of tensors that were handed in together, on their way."""

    terms: Terms
    layers: Sequence[Gradient]
    sources: list[torch.Tensor]
    words: torch.Tensor
    handle: int


@dataclass(eq=False)
class _Values:
    """Of one tensor, on their way."""

    terms: Terms
    layer: Gradient
    word: int
    handle: int


class TorchCarrier(Carrier):
    """Tensors that wait for `wait`, which sends the exponents of all of them, then their values.

    Nothing is sent before: ranks with other options would leave operations behind that nobody answers.
    """

    def __init__(self, name: str, process_set: Any, options: Options) -> None:
        super().__init__(options, process_set.size(), mpi_ops.gloo_enabled())
        self._name, self._process_set = name, process_set
        self._tickets: list[Ticket] = []
        self._exponents: list[_Exponents] = []
        self._values: list[_Values] = []
        _all.add(self)

    def expect(self, ticket: Ticket) -> None:
        """What is submitted from now on must not start before the ticket is over, unless somebody waits for it."""
        self._is_expected()  # forgets those that are over
        self._tickets.append(ticket)

    def wait(self, layers: Sequence[Layer] | None = None) -> None:
        """All-reduce everything submitted, until these layers have their results.

        Waits for the others as well as long as anything moves: what starts here must not depend on chance, since
        Horovod counts operations. A tensor that another rank has not begun stays behind. All other carriers of the
        process move on meanwhile, for ranks may take results in another order.
        """
        wanted = self._held() if layers is None else layers
        if all(layer.done for layer in wanted):
            return
        for one in list(_all):
            if one is self or one._is_expected():
                one._start()
        since = time.monotonic()
        while True:
            if any([one._advance() for one in list(_all)]):
                since = time.monotonic()
            is_done = all(layer.done for layer in wanted)
            if is_done and (not (self._exponents or self._values) or time.monotonic() - since > PATIENCE_SECONDS):
                return
            time.sleep(POLL_SECONDS)

    def _held(self) -> list[Layer]:
        """All layers that were handed in and have no result yet."""
        groups = [*self._waiting, *(group.layers for group in self._exponents)]
        return [*(layer for group in groups for layer in group), *(entry.layer for entry in self._values)]

    def _is_expected(self) -> bool:
        """Whether all ranks are known to be there with the same transport."""
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_over() or ticket.word(PACKED)]
        return not self._tickets

    def forget(self) -> None:
        super().forget()
        self._tickets = []

    def close(self) -> None:
        """Leave what is on its way: its handles belong to a world that is gone."""
        _all.discard(self)
        self._exponents, self._values = [], []

    def _start(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self.step_number += 1
            self._exponents += [self._start_exponents(layers) for layers in waiting]

    def _advance(self) -> bool:
        """Send values whose exponents are known, and hand over results that have come; True if there were any."""
        moved = False
        for group in [group for group in self._exponents if mpi_ops.poll(group.handle)]:
            self._exponents.remove(group)
            mpi_ops.synchronize(group.handle)
            options = group.terms.options
            check_option_words(group.words[-2:].tolist(), options)
            seed = stochastic_seed(options, self.step_number - 1, self._process_set.rank())
            self._values += [
                self._start_values(group.terms, layer, source, word, seed)
                for layer, source, word in zip(group.layers, group.sources, group.words.tolist())
            ]
            moved = True
        for entry in [entry for entry in self._values if mpi_ops.poll(entry.handle)]:
            self._values.remove(entry)
            self._finish(entry)
            moved = True
        return moved

    def _start_exponents(self, layers: Sequence[Gradient]) -> _Exponents:
        """CUDA tensors go by the host."""
        sources = [layer.staged.cpu() for layer in layers]
        words = self.words(layers, [source.data_ptr() for source in sources])
        shared = torch.tensor(words, dtype=torch.int32)
        handle = mpi_ops.allreduce_async_(
            shared, op=mpi_ops.Max, name=f"{self._name}.exponent.{layers[0].name}", process_set=self._process_set
        )
        return _Exponents(self.terms, layers, sources, shared, handle)

    def _start_values(
        self, terms: Terms, layer: Gradient, source: torch.Tensor, word: int, seed: int | None
    ) -> _Values:
        values = torch.empty(source.numel(), dtype=VALUE_DTYPES[terms.place.dtype])
        self.fill(terms, layer, source.data_ptr(), values.data_ptr(), word, seed, self.step_number)
        handle = mpi_ops.allreduce_async_(
            values, op=mpi_ops.Sum, name=f"{self._name}.value.{layer.name}", process_set=self._process_set
        )
        return _Values(terms, layer, word, handle)

    @staticmethod
    def _finish(entry: _Values) -> None:
        total = mpi_ops.synchronize(entry.handle)
        power, finite = back_scale(entry.word, entry.terms.place)
        # float64 holds every sum times every power of two that occurs, so this rounds once
        scaled = torch.ldexp(total.double(), torch.tensor(power)) * entry.layer.factor
        target = entry.layer.result
        target.copy_((scaled if finite else torch.full_like(scaled, torch.nan)).view(target.shape))
        entry.layer.done = True
