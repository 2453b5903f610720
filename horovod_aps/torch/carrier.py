"""transport="allreduce" for PyTorch: exponents by a MAX all-reduce, rounded values by a float16 all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops

from horovod_aps import carrier
from horovod_aps.exchange import POLL_SECONDS
from horovod_aps.kernels import CpuKernels
from horovod_aps.options import Options
from horovod_aps.statistics import Statistics


@dataclass
class CarriedTensor:
    """One tensor between its two all-reduces."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    dtype: int
    factor: float
    words: torch.Tensor
    position: int
    handle: int

    @property
    def word(self) -> int:
        """The shared exponent word, once the handle is done."""
        return int(self.words[self.position])


class CarrierBatch:
    """Tensors whose exponents are on their way; `flush` sends the values of all of them."""

    def __init__(self, name: str, process_set: Any, options: Options, statistics: Statistics) -> None:
        self._statistics = statistics
        self._name, self._process_set, self.options = name, process_set, options
        self._kernels = CpuKernels()
        self.size: int = process_set.size()
        self._top = carrier.carrier_exponent(options, self.size)
        self._tensors: list[CarriedTensor] = []
        self.step_number = 0

    def submit(self, entries: Sequence[tuple[str, torch.Tensor, torch.Tensor, int, float]]) -> int:
        """Start the exponents of one tensor or group; the handle is Horovod's. CUDA tensors go by the host."""
        entries = [(name, source.cpu(), target, dtype, factor) for name, source, target, dtype, factor in entries]
        factors = [factor for *_, factor in entries]
        words = torch.tensor([carrier.exponent_word(self._kernels, source.data_ptr(), source.numel(), dtype,
                                                    self.options)
                              for _, source, _, dtype, _ in entries] + carrier.option_words(self.options, factors),
                             dtype=torch.int32)
        handle: int = mpi_ops.mpi_lib.horovod_torch_allreduce_async_torch_IntTensor(
            words, words, 1, f"{self._name}.exponent.{entries[0][0]}".encode(), mpi_ops.Max, 1.0, 1.0,
            self._process_set.process_set_id)
        for position, (name, source, target, dtype, factor) in enumerate(entries):
            self._tensors.append(CarriedTensor(name, source, target, dtype, factor, words, position, handle))
        return handle

    def _account(self, name: str) -> Callable[[Any, Any, int], None]:
        """Counts a tensor that has just been rounded."""
        return lambda segment, message, exponent: self._statistics.add_carried(
            name, self._kernels, segment, message, exponent, self.options, self.size, self.step_number)

    def flush(self, finished: int) -> None:
        """All-reduce the values of everything submitted; `finished` is the handle Horovod has waited for."""
        tensors, self._tensors = self._tensors, []
        seed = None if self.options.rounding == "nearest" else (
            (self.options.seed << 40) ^ (self.step_number << 16) ^ self._process_set.rank())
        self.step_number += 1
        started = []
        for entry in tensors:
            while entry.handle != finished and not mpi_ops.poll(entry.handle):
                time.sleep(POLL_SECONDS)
            carrier.check_option_words(entry.words[-2:].tolist(), self.options)
            values = torch.empty(entry.source.numel(), dtype=torch.float16)
            carrier.fill_carrier(self._kernels, entry.source.data_ptr(), entry.source.numel(), entry.dtype,
                                 values.data_ptr(), entry.word, self._top, self.options, seed,
                                 self._account(entry.name))
            started.append(mpi_ops.allreduce_async_(values, op=mpi_ops.Sum, name=f"{self._name}.value.{entry.name}",
                                                    process_set=self._process_set))
        for entry, handle in zip(tensors, started):
            total = mpi_ops.synchronize(handle)
            power, finite = carrier.back_scale(entry.word, self._top)
            # float64 holds every float16 times every power of two that occurs, so this rounds once
            scaled = torch.ldexp(total.double(), torch.tensor(power)) * entry.factor
            entry.target.copy_((scaled if finite else torch.full_like(scaled, torch.nan)).view(entry.target.shape))
