"""transport="allreduce" for PyTorch: exponents by a MAX all-reduce, rounded values by one in float16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from horovod_aps import carrier
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import FLOAT16, FLOAT32, CpuKernels
from horovod_aps.options import Options
from horovod_aps.seeds import stochastic_seed

VALUE_DTYPES = {FLOAT16: torch.float16, FLOAT32: torch.float32}


@dataclass
class CarriedTensor:
    """One tensor between its two all-reduces."""

    layer: Layer
    source: torch.Tensor
    words: torch.Tensor
    position: int
    handle: int

    @property
    def word(self) -> int:
        """The shared exponent word, once the handle is done."""
        return int(self.words[self.position])


class CarrierBatch:
    """Tensors whose exponents are on their way; `flush` sends the values of all of them."""

    def __init__(self, name: str, process_set: Any, options: Options) -> None:
        self._name, self._process_set, self.options = name, process_set, options
        self._kernels = CpuKernels()
        self.members = tuple(process_set.ranks)
        self._place = carrier.carrier_place(options, len(self.members), mpi_ops.gloo_enabled())
        self._tensors: list[CarriedTensor] = []
        self.step_number = 0

    def submit(self, layers: Sequence[Layer]) -> None:
        """Start the exponents of one tensor or group. CUDA tensors go by the host."""
        sources = [layer.keep.staged.cpu() for layer in layers]
        words = torch.tensor([carrier.exponent_word(self._kernels, source.data_ptr(), source.numel(), layer.dtype,
                                                    self.options)
                              for layer, source in zip(layers, sources)]
                             + carrier.option_words(self.options, [layer.factor for layer in layers]),
                             dtype=torch.int32)
        handle: int = mpi_ops.mpi_lib.horovod_torch_allreduce_async_torch_IntTensor(
            words, words, 1, f"{self._name}.exponent.{layers[0].name}".encode(), mpi_ops.Max, 1.0, 1.0,
            self._process_set.process_set_id)
        for position, (layer, source) in enumerate(zip(layers, sources)):
            self._tensors.append(CarriedTensor(layer, source, words, position, handle))

    def flush(self) -> None:
        """All-reduce the values of everything submitted."""
        tensors, self._tensors = self._tensors, []
        seed = stochastic_seed(self.options, self.step_number, self._process_set.rank())
        self.step_number += 1
        try:
            for handle in dict.fromkeys(entry.handle for entry in tensors):
                mpi_ops.mpi_lib.horovod_torch_wait_and_clear(handle)
        except RuntimeError as error:
            raise HorovodInternalError(error) from None
        started = []
        for entry in tensors:
            carrier.check_option_words(entry.words[-2:].tolist(), self.options)
            values = torch.empty(entry.source.numel(), dtype=VALUE_DTYPES[self._place.dtype])
            carrier.fill_carrier(self._kernels, entry.source.data_ptr(), entry.source.numel(), entry.layer.dtype,
                                 values.data_ptr(), entry.word, self._place, self.options, seed)
            started.append(mpi_ops.allreduce_async_(values, op=mpi_ops.Sum,
                                                    name=f"{self._name}.value.{entry.layer.name}",
                                                    process_set=self._process_set))
        for entry, handle in zip(tensors, started):
            total = mpi_ops.synchronize(handle)
            power, finite = carrier.back_scale(entry.word, self._place)
            # float64 holds every sum times every power of two that occurs, so this rounds once
            scaled = torch.ldexp(total.double(), torch.tensor(power)) * entry.layer.factor
            target = entry.layer.keep.result
            target.copy_((scaled if finite else torch.full_like(scaled, torch.nan)).view(target.shape))
            entry.layer.done = True
