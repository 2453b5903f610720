"""What all frontends refuse, in the same words."""

from __future__ import annotations

from typing import Any

from horovod_aps.options import Options

NO_INSTANCE = "APSCompressor: compression must be an instance, not the class; write compression=APSCompressor(e=4, m=3)"
OTHER_COMPRESSION = (
    "APSCompressor: another rank reduces the same tensor without APSCompressor, as hvd.Compression.none and fp16 do; "
    "give all ranks the same compression"
)

OTHER_ORDER = (
    "APSCompressor: all ranks wait for each other, in different compressors; these are told apart by the order in "
    "which they are made, so make the same ones in the same order on all ranks, also where only some use them"
)


def no_answer(seconds: float) -> str:
    """What to say of other ranks that do not come; that they are late is no mistake."""
    return (
        f"APSCompressor: no answer from all other ranks for {seconds:.0f} s. If they are late (data, compiling), "
        f"nothing is wrong. Else one of them may have another compression, such as hvd.Compression.none, or lack these "
        f"tensors: all ranks must be given the same"
    )


def wrong_op(op: int, mpi_ops: Any) -> ValueError:
    """For a reduction other than Average and Sum; `mpi_ops` has Horovod's names of them."""
    names = {getattr(mpi_ops, name): name for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product")}
    return ValueError(
        f"APSCompressor: op must be Average or Sum, got {names.get(op, op)}; use hvd.Compression.none for it"
    )


def wrong_dtype(dtype: Any) -> TypeError:
    """For a floating-point tensor that no kernel knows."""
    return TypeError(f"APSCompressor: tensors must be float32, float64, float16 or bfloat16, got {dtype}")


def wrong_layout(layout: Any) -> TypeError:
    """For a tensor that is more than its elements."""
    return TypeError(
        f"APSCompressor: tensors must be dense (torch.strided), got {layout}; hvd.DistributedOptimizer gathers sparse "
        f"gradients without compression, or makes them dense with sparse_as_dense=True"
    )


def no_name() -> ValueError:
    """For a tensor without a name that has a residual."""
    return ValueError("APSCompressor: error_feedback must know a tensor from step to step; give hvd.allreduce a name")


def refuse_alone(options: Options) -> None:
    """Raise ValueError if a single rank is told to reduce in two levels; all that it can do is nothing."""
    if options.hierarchy == "two-level":
        raise ValueError(f'{options.who}: hierarchy="two-level" cannot be: there is only one rank')


def check_present(n_present: int, n_packed: int, size: int) -> None:
    """Raise ValueError, on all ranks, if they do not all have the same `transport`, or it needs ranks that are away.

    How many are there and how many of them have transport="packed" is what ranks have said in a ticket.
    """
    if 0 < n_packed < n_present:
        raise ValueError(
            f'APSCompressor: option transport is "packed" on {n_packed} ranks and "allreduce" on '
            f"{n_present - n_packed}; all ranks must use the same options"
        )
    if n_packed and n_present != size:
        raise ValueError(
            f"APSCompressor: {size - n_present} of {size} ranks are in hvd.join(), which only a plain all-reduce can "
            f'go on without; use APSCompressor(..., transport="allreduce")'
        )
