"""FSDP2: `module.set_custom_reduce_scatter(APSReduceScatter(e=4, m=3))`, gradients to their shards as packed bytes.

FSDP hands over the gradients of a module as one flat tensor, cut into one chunk per rank, without names or shapes. So
the scale is that of a block of each chunk, or what a format has within one. One rounding, sums in float32, no Horovod.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from horovod_aps.engine.exchange import Exchange
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import BucketLayout
from horovod_aps.engine.reductions import Reduction
from horovod_aps.engine.reductions.owners import Owners
from horovod_aps.formats import Format
from horovod_aps.frontends.compressor import BaseCompressor, ByBits
from horovod_aps.frontends.group import join
from horovod_aps.frontends.reducer import ReducerKey
from horovod_aps.frontends.tensors import DTYPE_CODES
from horovod_aps.kernels import for_torch
from horovod_aps.options import read_format

BLOCK = 1 << 15


class PackedReduceScatter(BaseCompressor):
    """Reduce-scatter for `FSDPModule.set_custom_reduce_scatter`; one may serve all modules of a model.

    A block in which any rank has NaN or Inf becomes NaN as a whole. It returns when the shard is there: nothing of it
    overlaps with backward.
    """

    _who = "PackedReduceScatter"

    def __init__(self, format: Format | str, *, block: int = BLOCK, **options: Any) -> None:
        """Options are those of `horovod_aps.torch.PackedCompressor` that need no names.

        Args:
            format: one of `horovod_aps.formats`, or its text, such as "mx-e4m3"; not OneBit, which needs error
                feedback. MX, QSGD and those of `tables` have scales of their own within a block.
            block: elements of a chunk that share a scale, for formats with one scale per layer. Fewer follow the
                gradients' size more closely, and each costs a word to every rank and some time.
            options: without error_feedback, overrides, transport and hierarchy.
        """
        self._check(block, options)
        format = read_format(format, who=self._who)
        if format.needs_error_feedback:
            raise ValueError(
                f"{self._who}: format must do without error feedback, for which FSDP tells no names, got {format}"
            )
        super().__init__(format, **options)
        self._block = block

    def _check(self, block: int, options: dict[str, Any]) -> None:
        who = type(self).__name__
        for name in ("error_feedback", "overrides"):
            if options.get(name):
                raise ValueError(f"{who}: {name} needs names, which FSDP does not tell, got {options[name]!r}")
        for name, only in (("transport", "packed"), ("hierarchy", "flat")):
            if options.setdefault(name, only) != only:
                raise ValueError(f"{who}: {name} must be {only!r}, got {options[name]!r}")
        if isinstance(block, bool) or not isinstance(block, int) or block < 1:
            raise ValueError(f"{who}: block must be a positive int, got {block!r}")

    def _start(self) -> None:
        super()._start()
        self._block = BLOCK
        self._by_group: dict[tuple[Any, torch.device], Exchange] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"block": self._block}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._block = state["block"]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a flat gradient; FSDP asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with this rank's chunk of the reduced `input_tensor`; it is there on return."""
        if output_tensor.dtype not in DTYPE_CODES:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        if input_tensor.dtype != output_tensor.dtype:
            raise TypeError(
                f"{type(self).__name__}: input and output must have one dtype, got {input_tensor.dtype} and "
                f"{output_tensor.dtype}"
            )
        if not (input_tensor.is_contiguous() and output_tensor.is_contiguous()):
            raise ValueError(f"{type(self).__name__}: input and output must be contiguous")
        size = dist.get_world_size(group)
        if input_tensor.numel() != size * output_tensor.numel():
            raise ValueError(
                f"{type(self).__name__}: the input must have {size} chunks of {output_tensor.numel()} elements, "
                f"got {input_tensor.numel()}"
            )
        factor = _factor(type(self).__name__, op, size)
        if size == 1:
            torch.mul(input_tensor, factor, out=output_tensor)
        else:
            exchange = self._exchange(group, input_tensor.device)
            exchange.submit(*self._layers(output_tensor, input_tensor, dist.get_rank(group), size, factor))
            exchange.wait()
        return _Done() if async_op else None  # type: ignore[return-value]

    def _layers(self, output: Tensor, whole: Tensor, rank: int, size: int, factor: float) -> list[Layer]:
        """A layer per block of every chunk; the chunks' first blocks come first, so that ranks share the work."""
        n, item, code = output.numel(), output.element_size(), DTYPE_CODES[output.dtype]
        source, target, keep = whole.data_ptr(), output.data_ptr(), (output, whole)
        label = f"chunk of {n}"
        return [
            Layer(
                f"{n}.{start}.{owner}",
                (min(self._block, n - start),),
                code,
                source + (owner * n + start) * item,
                target + start * item,  # written on the owner alone
                factor,
                keep,
                label,
            )
            for start in range(0, n, self._block)
            for owner in range(size)
        ]

    def _exchange(self, group: Any, device: torch.device) -> Exchange:
        found = self._by_group.get((group, device))
        if found is None:
            found = self._by_group[group, device] = Exchange(
                for_torch.kernels_for(device),
                None,
                self._options,
                partial(for_torch.on, device),
                choose_reduction=_by_owners,
            )
            found.any_thread = device.type == "cpu"
            members = join(found, group, device, "a reduce-scatter has one level")
            self._keep(ReducerKey(len(self._by_group), str(device), members), found)
        return found


class APSReduceScatter(ByBits, PackedReduceScatter):
    """`PackedReduceScatter(FloatFormat(e, m))`: `module.set_custom_reduce_scatter(APSReduceScatter(e=4, m=3))`.

    All that is said of `PackedReduceScatter` holds.
    """

    _who = "APSReduceScatter"

    def __init__(self, e: int, m: int, *, block: int = BLOCK, **options: Any) -> None:
        """Options are those of `horovod_aps.torch.APSCompressor` that need no names.

        Args:
            e: exponent bits, 1..8.
            m: mantissa bits, 0..23. 1+e+m bits per element are sent.
            block: elements of a chunk that share a scale. Fewer follow the gradients' size more closely, and each
                costs a word to every rank and some time.
            options: without error_feedback, overrides, transport and hierarchy.
        """
        self._check(block, options)
        ByBits.__init__(self, e, m, **options)
        self._block = block


def _factor(who: str, op: Any, size: int) -> float:
    """What the sum is multiplied by."""
    kind, factor = op.__getstate__() if type(op) is dist.ReduceOp else (op, None)  # type: ignore[attr-defined]
    if kind == dist.ReduceOp.AVG:
        return 1.0 / size
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.PREMUL_SUM and isinstance(factor, float):
        return factor
    raise ValueError(f"{who}: op must be SUM or AVG, got {op}")


def _by_owners(bucket: BucketLayout, rank: int, size: int) -> Reduction:
    return Owners(bucket, rank, size)


class _Done:
    """The work of something that is over."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True
