"""Packed all-gather and reduce-scatter of tensors, with autograd: activations between ranks that share a layer.

Beside the compressors, on the same exchange: ranks meet by a ticket, agree on shapes, dtype, format and operation, and
all raise the same error if they differ. Results are there on return.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops

from horovod_aps.engine import progress
from horovod_aps.engine.agreement import REFUSED
from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import BucketLayout
from horovod_aps.engine.reductions import Reduction
from horovod_aps.engine.reductions.gather import Gather
from horovod_aps.engine.reductions.owners import Owners
from horovod_aps.errors import LostPeer
from horovod_aps.formats import Format
from horovod_aps.frontends.tensors import DTYPE_CODES
from horovod_aps.frontends.world import mpi_usable
from horovod_aps.kernels import for_torch
from horovod_aps.options import Options, read_format
from horovod_aps.torch.ticket import PRESENT, Ticket

N_TICKETS = 8  # that may be under way at once: nobody waits for one whose exchange is over
global_process_set = mpi_ops.global_process_set


def allgather(
    tensor: torch.Tensor,
    format: Format | str,
    *,
    name: str | None = None,
    process_set: Any = global_process_set,
    rounding: str = "nearest",
    seed: int = 0,
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along the first dimension, rounded to `format` once.

    Every rank gets the same bits, its own tensor rounded as well. The backward is `reduce_scatter` of the gradients,
    their sum, in the same format. A tensor in which there is NaN or Inf arrives as NaN as a whole.

    Args:
        tensor: of the same shape and floating-point dtype on all ranks.
        format: one of `horovod_aps.formats`, or its text, such as "e4m3"; "float32" does not compress.
        name: for messages and the timeline.
        process_set: the ranks that take part.
        rounding: "nearest" or "stochastic", for formats that leave it open.
        seed: of stochastic rounding.
    """
    with _refusing("allgather", tensor, process_set):
        options = _options("allgather", format, rounding, seed)
        _check("allgather", tensor)
    return _Gather.apply(tensor, options, 1.0, name, process_set, "allgather")


def reduce_scatter(
    tensor: torch.Tensor,
    format: Format | str,
    *,
    op: Any = mpi_ops.Sum,
    name: str | None = None,
    process_set: Any = global_process_set,
    rounding: str = "nearest",
    seed: int = 0,
) -> torch.Tensor:
    """This rank's part, along the first dimension, of the sum or average of all ranks' tensors.

    Values are rounded to `format` once and added in float32, in the order of the ranks; the sum is not rounded again.
    The backward is `allgather` of the gradients in the same format, divided by the number of ranks for hvd.Average. A
    part in which any rank has NaN or Inf becomes NaN as a whole.

    Args:
        tensor: of the same shape and floating-point dtype on all ranks; its first dimension must be a multiple of
            their number.
        format: one of `horovod_aps.formats`, or its text, such as "e4m3"; "float32" does not compress.
        op: hvd.Sum or hvd.Average.
        name: for messages and the timeline.
        process_set: the ranks that take part.
        rounding: "nearest" or "stochastic", for formats that leave it open.
        seed: of stochastic rounding.
    """
    with _refusing("reduce_scatter", tensor, process_set):
        options = _options("reduce_scatter", format, rounding, seed)
        _check("reduce_scatter", tensor)
        if op not in (mpi_ops.Sum, mpi_ops.Average):
            raise ValueError(f"reduce_scatter: op must be hvd.Sum or hvd.Average, got {op!r}")
        size = process_set.size()
        if tensor.dim() == 0 or tensor.shape[0] % size:
            raise ValueError(
                f"reduce_scatter: the first dimension must be a multiple of {size}, the number of ranks, got shape "
                f"{tuple(tensor.shape)}"
            )
    factor = 1.0 / size if op == mpi_ops.Average else 1.0
    return _Scatter.apply(tensor, options, factor, name, process_set, "reduce_scatter")


def collective_bytes() -> float:
    """Bytes that this rank has sent so far in `allgather` and `reduce_scatter`."""
    return sum(room.exchange.statistics.bytes_sent for room in _rooms.values())


# ---- autograd ---------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """With `_Scatter` as its backward, and the reverse: gradients of gradients are there too."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, options: Options, factor: float, name: str | None, process_set: Any, what: str
    ) -> torch.Tensor:
        ctx.rest = options, factor, name, process_set, f"{what}.backward"
        ctx.shape = tensor.shape
        return _gather(tensor, options, name, process_set, what, factor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Scatter.apply(gradient, *ctx.rest).view(ctx.shape), None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, options: Options, factor: float, name: str | None, process_set: Any, what: str
    ) -> torch.Tensor:
        ctx.rest = options, factor, name, process_set, f"{what}.backward"
        return _scatter(tensor, options, factor, name, process_set, what)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Gather.apply(gradient, *ctx.rest), None, None, None, None, None


# ---- arguments --------------------------------------------------------------------------------------------


def _options(who: str, format: Format | str, rounding: str, seed: int) -> Options:
    return _checked_options(who, read_format(format, who=who), rounding, seed)


@lru_cache(maxsize=256)
def _checked_options(who: str, fmt: Format, rounding: str, seed: int) -> Options:
    """The same object for the same arguments: plans are looked up by it."""
    if fmt.needs_error_feedback:
        raise ValueError(f"{who}: {fmt} needs error feedback, which activations do not have; use another format")
    return Options(format=fmt, rounding=rounding, seed=seed, hierarchy="flat", who=who)


@contextmanager
def _refusing(who: str, tensor: Any, process_set: Any) -> Generator[None, None, None]:
    """Around the checks of arguments: if this rank refuses its own, the others learn of it instead of waiting."""
    if not isinstance(process_set, ProcessSet):
        raise TypeError(f"{who}: process_set must be one of Horovod's, got {process_set!r}")
    if process_set.process_set_id is None or mpi_ops.rank() not in process_set.ranks:
        raise ValueError(f"{who}: rank {mpi_ops.rank()} is not in the process set {process_set}")
    try:
        yield
    except (TypeError, ValueError) as error:
        device = tensor.device if isinstance(tensor, torch.Tensor) else torch.device("cpu")
        if process_set.size() > 1:
            nothing = torch.empty(1)
            layer = Layer(REFUSED + str(error), (0,), 0, nothing.data_ptr(), nothing.data_ptr(), 1.0, nothing)
            with suppress(ValueError):  # from all ranks that do not refuse the same
                _room(process_set, device).run([layer], _options(who, "float32", "nearest", 0), Gather)
        raise


def _check(who: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{who}: tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"{who}: tensor must be dense, got {tensor.layout}")
    if tensor.dtype not in DTYPE_CODES:
        raise TypeError(f"{who}: tensor must be float32, float64, float16 or bfloat16, got {tensor.dtype}")


# ---- the exchange -----------------------------------------------------------------------------------------


def _gather(
    tensor: torch.Tensor,
    options: Options,
    name: str | None,
    process_set: Any,
    what: str,
    factor: float,
) -> torch.Tensor:
    own = tensor.detach().contiguous().resolve_neg()
    rows = own.reshape(1) if own.dim() == 0 else own
    size, rank = process_set.size(), process_set.rank()
    out = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
    if size == 1:
        return out.copy_(rows).mul_(factor)
    step = rows.numel() * rows.element_size()
    places = [out.data_ptr() + owner * step for owner in range(size)]
    sources = [rows.data_ptr() if owner == rank else place for owner, place in enumerate(places)]
    _room(process_set, own.device).run(
        _layers(f"{what}.{name or 'noname'}", rows.shape, rows, sources, places, factor, (rows, out)), options, Gather
    )
    return out


def _scatter(
    tensor: torch.Tensor,
    options: Options,
    factor: float,
    name: str | None,
    process_set: Any,
    what: str,
) -> torch.Tensor:
    own = tensor.detach().contiguous().resolve_neg()
    size = process_set.size()
    shape = (own.shape[0] // size, *own.shape[1:])
    out = own.new_empty(shape)
    if size == 1:
        return torch.mul(own, factor, out=out)
    step = out.numel() * out.element_size()
    sources = [own.data_ptr() + owner * step for owner in range(size)]
    places = [out.data_ptr()] * size  # written on the owner alone
    _room(process_set, own.device).run(
        _layers(f"{what}.{name or 'noname'}", shape, own, sources, places, factor, (own, out)), options, Owners
    )
    return out


def _layers(
    label: str,
    shape: Sequence[int],
    like: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    factor: float,
    keep: Any,
) -> list[Layer]:
    """A layer per owner."""
    code = DTYPE_CODES[like.dtype]
    return [
        Layer(f"{label}.{owner}", tuple(shape), code, source, target, factor, keep)
        for owner, (source, target) in enumerate(zip(sources, targets))
    ]


class _Room:
    """The ranks of a process set with tensors on one device: one conversation, so that whatever differs is seen."""

    def __init__(self, process_set: Any, device: torch.device, label: str) -> None:
        """`label` is what all ranks call the device."""
        self._id, self._members = process_set.process_set_id, tuple(process_set.ranks)
        options = _options("allgather", "float32", "nearest", 0)
        self.exchange = Exchange(for_torch.kernels_for(device), None, options, partial(for_torch.on, device))
        self.exchange.any_thread = device.type == "cpu"
        self._name = f"horovod_aps.collectives.{self._id}.{label}"
        self._tickets: deque[Ticket] = deque()
        self._number = 0
        self._lock = threading.Lock()

    def run(self, layers: list[Layer], options: Options, reduction: type[Owners]) -> None:
        """Exchange layers; on return their targets are filled. ValueError on all ranks if they mean something else."""
        with self._lock:
            exchange, ticket = self.exchange, self._open()
            exchange.gate = partial(self._meet, ticket)  # nothing is said before all ranks are known to be there
            exchange.options, exchange.choose_reduction = options, partial(_reduction, reduction)
            try:
                with exchange.context():
                    exchange.submit(*layers)
                    progress.run(exchange, self._steps(ticket))
                    exchange.kernels.end()
            except LostPeer as error:
                raise HorovodInternalError(str(error)) from None

    def _steps(self, ticket: Ticket) -> Generator[bool, None, None]:
        """Those of the exchange, until a ticket says that some rank is in `hvd.join()`."""
        is_checked = False
        for moved in self.exchange.steps():
            if not is_checked and ticket.is_over():
                is_checked = True
                try:
                    ticket.check()
                except ValueError:
                    self.exchange.forget()
                    self._number -= 1  # they have not opened this one
                    raise ValueError(
                        f"{self.exchange.options.who}: {len(self._members) - ticket.word(PRESENT)} of "
                        f"{len(self._members)} ranks are in hvd.join(); all must take part"
                    ) from None
            yield moved

    def _open(self) -> Ticket:
        """A Horovod operation that stands for the call: Horovod tells of ranks that do not come."""
        while self._tickets and (len(self._tickets) >= N_TICKETS or self._tickets[0].is_over()):
            first = self._tickets.popleft()
            first.waited_for()
            first.clear()
        self._number += 1
        ticket = Ticket(
            f"{self._name}.{self._number % N_TICKETS}",
            self._id,
            self._members.index(mpi_ops.rank()),
            len(self._members),
            packed=True,
            speaks_mpi=mpi_usable(mpi_ops._basics),
        )
        self._tickets.append(ticket)
        return ticket

    def _meet(self, ticket: Ticket) -> bool:
        """Whether all ranks have come; connects them."""
        if not ticket.all_there():
            return False
        if self.exchange.transport is None:
            name = f"{self._name} {self._members}"
            self.exchange.connect(ticket.link(name, self._members, "activations have one level", False))
        return True


def _reduction(kind: type[Owners], bucket: BucketLayout, rank: int, size: int) -> Reduction:
    return kind(bucket, rank, size)


_rooms: dict[Any, _Room] = {}
_world: Any = None


def _room(process_set: Any, device: torch.device) -> _Room:
    """The room of a process set, made anew in a new world."""
    global _world
    if _world is not mpi_ops._handle_map:  # hvd.init() makes a new one
        for room in _rooms.values():
            room.exchange.forget()
            room.exchange.close()
        _rooms.clear()
        _world = mpi_ops._handle_map
    ranks = process_set.process_set_id, tuple(process_set.ranks)
    key = (*ranks, device)
    if key not in _rooms:
        n_others = sum(other[:2] == ranks and other[2].type == device.type for other in _rooms)
        _rooms[key] = _Room(process_set, device, f"{device.type}{n_others or ''}")
    return _rooms[key]
