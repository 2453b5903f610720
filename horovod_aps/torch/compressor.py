"""APSCompressor for PyTorch: Horovod's Compressor interface on one side, the exchange on the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.compression import Compressor

from horovod_aps.base import BaseCompressor
from horovod_aps.exchange import Exchange, Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.torch import seam
from horovod_aps.torch.horovod_transport import HorovodTransport
from horovod_aps.world import make_transport, process_set_of

DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}


@dataclass
class _Context:
    """What `decompress` must know of one tensor."""

    original: torch.Tensor
    staged: torch.Tensor
    batch: _Batch | None = None
    result: torch.Tensor | None = None


@dataclass
class _Batch:
    """Tensors submitted since the last flush to one exchange, and the Horovod operation that stands for them."""

    exchange: Exchange
    handle: int
    word: torch.Tensor
    world: Any
    flushed: bool = False
    error: BaseException | None = None
    n_unnamed: int = 0
    tickets: list[torch.Tensor] = field(default_factory=list)


class APSCompressor(BaseCompressor, Compressor):  # type: ignore[misc]
    __doc__ = BaseCompressor.__doc__

    def _start(self) -> None:
        super()._start()
        self._batches: dict[int, _Batch] = {}
        self._world: Any = None
        seam.register()

    # ---- Horovod's interface ------------------------------------------------------------------------------

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Context | None]:
        """Mark a floating-point tensor for the exchange; others pass through, as with Horovod's compressors."""
        if not tensor.dtype.is_floating_point or mpi_ops.size() == 1:
            return tensor, None
        if tensor.dtype not in DTYPE_CODES:
            raise TypeError(f"APSCompressor: tensors must be float32, float64, float16 or bfloat16, got {tensor.dtype}")
        staged = tensor if tensor.is_contiguous() else tensor.contiguous()
        wired = seam.wire(staged, self)
        context = wired.aps_context = _Context(tensor, staged)
        return wired, context

    def decompress(self, tensor: torch.Tensor, ctx: _Context | None) -> torch.Tensor:
        """The reduced tensor; the first call after a batch was submitted exchanges all of it."""
        if ctx is None:
            return tensor
        if ctx.batch is None:
            raise ValueError("APSCompressor: this tensor was compressed but never all-reduced")
        self._flush(ctx.batch)
        assert ctx.result is not None
        if ctx.result is ctx.staged and ctx.staged is not ctx.original:  # in place, through a contiguous copy
            ctx.original.copy_(ctx.staged)
            return ctx.original
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:  # keep autograd's link
            return tensor.as_subclass(torch.Tensor)
        return ctx.result

    # ---- The seam -----------------------------------------------------------------------------------------

    def _submit(self, tensors: Sequence[seam.WireTensor], outputs: Sequence[torch.Tensor],
                names: Sequence[str | None], group: str | None, op: int, factor: float, process_set_id: int,
                grouped: bool) -> int:
        """Take tensors that Horovod hands us, and return a handle that it can wait for."""
        if op not in (mpi_ops.Average, mpi_ops.Sum):
            raise ValueError(f"APSCompressor: op must be Average or Sum, got {_op_name(op)}; "
                             f"use hvd.Compression.none for it")
        batch = self._open_batch(process_set_id)
        exchange = batch.exchange
        if op == mpi_ops.Average:
            factor /= exchange.transport.size
        alone = exchange.transport.size == 1
        for tensor, output, name in zip(tensors, outputs, names):
            context: _Context = tensor.aps_context
            if name is None:
                name = f"noname.{batch.n_unnamed}"
                batch.n_unnamed += 1
            context.batch = batch
            context.result = context.staged if output is tensor else output.as_subclass(torch.Tensor)
            if alone:  # nothing to agree on and nothing to round
                torch.mul(context.staged, factor, out=context.result)
                continue
            exchange.submit(Layer(name, tuple(tensor.shape), DTYPE_CODES[tensor.dtype], context.staged.data_ptr(),
                                  context.result.data_ptr(), factor, context))
        if not grouped:
            return batch.handle
        # Horovod waits for every group by a handle of its own.
        handle, word = seam.ticket(f"{self._name}.group.{group}.{len(batch.tickets)}", process_set_id)
        batch.tickets.append(word)
        return handle

    def _open_batch(self, process_set_id: int) -> _Batch:
        batch = self._batches.get(process_set_id)
        if batch is None or batch.flushed or batch.world is not mpi_ops._handle_map:
            exchange = self._exchange(process_set_id)
            handle, word = seam.ticket(f"{self._name}.ticket.{process_set_id}", process_set_id)
            batch = self._batches[process_set_id] = _Batch(exchange, handle, word, mpi_ops._handle_map)
        return batch

    def _exchange(self, process_set_id: int) -> Exchange:
        if self._world is not mpi_ops._handle_map:  # hvd.init() makes a new one: this is another world
            self._world = mpi_ops._handle_map
            for exchange in self._exchanges.values():
                exchange.forget()
        key = (process_set_id, mpi_ops.size(), mpi_ops.rank())
        exchange = self._exchanges.get(key)
        if exchange is None:
            process_set = process_set_of(mpi_ops._basics, process_set_id)
            transport = make_transport(mpi_ops._basics, process_set, _agree,
                                       lambda: HorovodTransport(f"{self._name}.{process_set_id}", process_set))
            exchange = self._keep_exchange(key, CpuKernels(), transport)
        return exchange

    def _flush(self, batch: _Batch) -> None:
        if batch.flushed:
            if batch.error is not None:
                raise batch.error
            return
        batch.flushed = True
        try:
            n_present, size = int(batch.word[0]), batch.exchange.transport.size
            if n_present != size:
                raise ValueError(f"APSCompressor: {size - n_present} of {size} ranks are in hvd.join(), which only a "
                                 f'plain all-reduce can do without; use APSCompressor(..., transport="allreduce")')
            batch.exchange.flush()
        except BaseException as error:
            batch.error = error
            raise


def _agree(value: int, process_set: Any) -> int:
    """The smallest `value` of all ranks of the process set."""
    word = torch.tensor([value], dtype=torch.int32)
    handle = mpi_ops.allreduce_async_(word, op=mpi_ops.Min, process_set=process_set,
                                      name=f"horovod_aps.agree.{process_set.process_set_id}")
    return int(mpi_ops.synchronize(handle)[0])


def _op_name(op: int) -> str:
    names = {getattr(mpi_ops, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
    return names.get(op, str(op))
