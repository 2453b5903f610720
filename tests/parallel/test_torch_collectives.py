"""`horovod_aps.torch.allgather` and `reduce_scatter` on every rank of a real job.

Oracles: Horovod's own allgather and reducescatter in float32 (its backward averages, ours is the true adjoint), the
format's rounding through the exchange of one process, and autograd on the whole model in one process.
"""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from all_formats import every_format
from torch_common import to_numpy

from horovod_aps.formats import FloatFormat
from horovod_aps.kernels import CpuKernels, for_torch
from horovod_aps.torch import APSCompressor, allgather, collective_bytes, collectives, reduce_scatter

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
FORMATS = [fmt for fmt in every_format() if not fmt.needs_error_feedback]


def mine(*shape: int, seed: int = 0, rank: int = RANK) -> torch.Tensor:
    """This rank's tensor, which every rank can make."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def same_on_all(x: torch.Tensor) -> None:
    raw = x.detach().contiguous().view(-1).view(torch.uint8)
    assert all(torch.equal(row, raw) for row in hvd.allgather(raw[None], name="same"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4), (7, 2, 3), (1025,)], ids=str)
def test_float32_is_what_horovod_gives(shape, dtype):
    x = mine(*shape).to(dtype)
    found = allgather(x, "float32")
    if dtype != torch.bfloat16:
        assert torch.equal(found, hvd.allgather(x.double(), name="g").to(dtype) if x.numel() else found)
    assert found.shape == (SIZE * shape[0], *shape[1:]) and found.dtype == dtype
    same_on_all(found)
    whole = mine(SIZE * shape[0], *shape[1:])
    for op in (hvd.Sum, hvd.Average):
        ours = reduce_scatter(whole, "float32", op=op)
        parts = [
            mine(SIZE * shape[0], *shape[1:], rank=k).chunk(SIZE)[RANK] if whole.numel() else ours for k in range(SIZE)
        ]
        exact = sum(part.double() for part in parts) / (SIZE if op == hvd.Average else 1)
        torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)
        if whole.numel():
            theirs = hvd.reducescatter(whole, op=op, name="r")
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_format_gives_all_ranks_the_same_bits(fmt):
    for shape in ((1,), (3, 5), (64, 33)):
        x = mine(*shape, seed=1)
        found = [allgather(x, fmt, seed=5), allgather(x, str(fmt), seed=5)]
        for one in found:
            same_on_all(one)
        if fmt.rounding != "stochastic":
            assert torch.equal(*found)
        everyone = torch.cat([mine(*shape, seed=1, rank=k) for k in range(SIZE)])
        assert (found[0] - everyone).norm() <= 0.75 * everyone.norm()
        if isinstance(fmt, FloatFormat):  # scaled by a power of two that lets the largest fit, then rounded
            part = everyone.chunk(SIZE)[0]
            rounded = scaled(fmt, to_numpy(part))
            assert np.array_equal(to_numpy(found[0].chunk(SIZE)[0]), rounded)


def scaled(fmt: FloatFormat, x: np.ndarray) -> np.ndarray:
    """What a FloatFormat makes of a layer, by its definition."""
    exponent = int(np.frexp(np.abs(x).max())[1]) - 1
    while not np.isfinite(fmt.quantize(np.ldexp(np.abs(x).max().astype(np.float64), fmt.top_exponent - exponent))):
        exponent += 1
    back = fmt.quantize(np.ldexp(x.astype(np.float64), fmt.top_exponent - exponent))
    return np.ldexp(back, exponent - fmt.top_exponent).astype(np.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_tensors_arrive_as_nan(bad):
    x = mine(4, 3)
    if RANK == SIZE - 1:
        x[1, 1] = bad
    found = allgather(x, "e4m3").chunk(SIZE)
    assert found[-1].isnan().all() and found[0].isfinite().all()
    whole = torch.ones(SIZE, 3)
    if RANK == 0:
        whole[1, 2] = bad
    part = reduce_scatter(whole, "e4m3")
    assert part.isnan().all() if RANK == 1 else torch.equal(part, torch.full((1, 3), float(SIZE)))
    assert not allgather(torch.zeros(5), "e4m3").any()


def test_gradients_are_those_of_the_whole_model():
    """A layer split over all ranks, its input gathered, its output scattered. Oracle: autograd in one process.

    The gradient of what a rank alone has is that of the sum of all ranks' losses.
    """
    rows, wide = 4, 6 * SIZE
    first, second = mine(10, wide, seed=7, rank=0), mine(wide, 3, seed=8, rank=0)
    x = mine(rows, 10, seed=9).requires_grad_()
    columns = slice(6 * RANK, 6 * RANK + 6)
    own = [first[:, columns].clone().requires_grad_(), second[columns].clone().requires_grad_()]
    for fmt, bound in (("float32", 1e-5), ("e5m10", 2e-2)):
        hidden = torch.tanh(allgather(x, fmt, name="in") @ own[0])
        out = reduce_scatter(hidden @ own[1], fmt, name="out")
        gradients = torch.autograd.grad((out**2).sum(), [x, *own])
        inputs = [mine(rows, 10, seed=9, rank=k).requires_grad_() for k in range(SIZE)]
        whole = [first.clone().requires_grad_(), second.clone().requires_grad_()]
        result = torch.tanh(torch.cat(inputs) @ whole[0]) @ whole[1]
        exact = torch.autograd.grad((result**2).sum(), [inputs[RANK], *whole])
        torch.testing.assert_close(out, result.chunk(SIZE)[RANK], rtol=bound, atol=bound)
        for ours, theirs in zip(gradients, (exact[0], exact[1][:, columns], exact[2][columns])):
            assert (ours - theirs).norm() < bound * theirs.norm()


def test_backward_is_the_other_operation_of_horovods():
    """By name: operations in the backward of Horovod's own have none, and ranks outside a process set count fewer."""
    x, weight = mine(4, 3).requires_grad_(), mine(4 * SIZE, 3, seed=2)
    found = torch.autograd.grad((allgather(x, "float32") * weight).sum(), x)[0]
    torch.testing.assert_close(found, hvd.reducescatter(weight, op=hvd.Sum, name="adjoint.a"))
    whole, weight = mine(4 * SIZE, 3).requires_grad_(), mine(4, 3, seed=3)
    found = torch.autograd.grad((reduce_scatter(whole, "float32", op=hvd.Average) * weight).sum(), whole)[0]
    torch.testing.assert_close(found, hvd.allgather(weight, name="adjoint.b") / SIZE)


@pytest.mark.parametrize("op", ["allgather", "reduce_scatter"])
def test_gradients_of_gradients(op):
    """A penalty on the gradient reaches the input. Oracle: autograd on the whole model in one process."""
    parts = [mine(2 * SIZE, 3, seed=4, rank=k).requires_grad_() for k in range(SIZE)]

    def penalty_of(result: torch.Tensor, of: list[torch.Tensor]) -> torch.Tensor:
        gradients = torch.autograd.grad(result.pow(3).sum(), of, create_graph=True)
        return sum(gradient.pow(2).sum() for gradient in gradients)

    if op == "allgather":  # every rank has a loss of all parts
        whole = torch.cat(parts)
        gradients = torch.autograd.grad(SIZE * whole.pow(3).sum(), parts, create_graph=True)
    else:  # each rank has a loss of its rows of the sum
        gradients = torch.autograd.grad(sum(parts).pow(3).sum(), parts, create_graph=True)
    wanted = torch.autograd.grad(sum(gradient.pow(2).sum() for gradient in gradients), parts)[RANK]
    x = mine(2 * SIZE, 3, seed=4).requires_grad_()
    result = (allgather if op == "allgather" else reduce_scatter)(x, "float32")
    penalty_of(result, [x]).backward()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-5, atol=1e-4)


def test_inputs_that_are_not_contiguous_are_left_alone():
    x = mine(6, 4 * SIZE).t()[::2]
    before = x.clone()
    assert torch.equal(allgather(x, "float32"), hvd.allgather(x.contiguous(), name="n"))
    reduce_scatter(x, "e4m3")
    assert torch.equal(x, before)
    assert allgather(torch.tensor(float(RANK)), "float32").tolist() == list(map(float, range(SIZE)))
    scalar = torch.tensor(float(RANK), requires_grad=True)
    (allgather(scalar, "float32") * 2).sum().backward()
    assert scalar.grad == 2 * SIZE


@pytest.mark.parametrize("what", ["shape", "dtype", "format", "kind", "multiple", "integers", "nothing", "name"])
def test_disagreement_raises_on_every_rank_and_the_process_goes_on(what):
    odd = SIZE - 1 == RANK
    calls = {
        "shape": lambda: allgather(mine(3 + odd, 2), "e4m3"),
        "dtype": lambda: allgather(mine(3).to(torch.float64 if odd else torch.float32), "e4m3"),
        "format": lambda: allgather(mine(3), "e4m3" if odd else "e5m2"),
        "kind": lambda: (allgather if odd else reduce_scatter)(mine(SIZE), "e4m3"),
        "multiple": lambda: reduce_scatter(mine(2 * SIZE + odd), "e4m3"),
        "integers": lambda: allgather(torch.ones(3, dtype=torch.int32 if odd else torch.float32), "e4m3"),
        "nothing": lambda: allgather(mine(3), None if odd else "e4m3"),
        "name": lambda: allgather(mine(3), "e4m3", name=f"{odd}"),
    }
    refused = what in ("multiple", "integers", "nothing") and not odd
    words = f"rank {SIZE - 1} refuses its arguments: (allgather|reduce_scatter): " if refused else ""
    with pytest.raises((ValueError, TypeError), match=words or "allgather|reduce_scatter"):
        calls[what]()
    assert torch.equal(allgather(torch.full((2,), float(RANK)), "e4m3").unique(), torch.arange(float(SIZE)).unique())


def test_wrong_arguments_on_all_ranks():
    for call, words in (
        (lambda: allgather([1.0], "e4m3"), "tensor must be a torch.Tensor"),
        (lambda: allgather(mine(3), "e9m9"), "allgather: format must be"),
        (lambda: allgather(mine(3), [4, 3]), r"allgather: format must be .* got \[4, 3\]"),
        (lambda: allgather(mine(3).to_sparse(), "e4m3"), "tensor must be dense"),
        (lambda: allgather(mine(3), "e4m3", process_set=0), "process_set must be one of Horovod's, got 0"),
        (lambda: allgather(mine(3), "onebit"), "error feedback, which activations do not have"),
        (lambda: reduce_scatter(mine(SIZE), "e4m3", op=hvd.Max), "op must be hvd.Sum or hvd.Average"),
        (lambda: reduce_scatter(mine(SIZE), "e4m3", rounding="up"), "reduce_scatter: rounding must be one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call()


def test_beside_a_compressor_and_unnamed_operations():
    """Many calls: tickets are used again, and nothing comes between Horovod's own numbers."""
    compressor, before = APSCompressor(4, 3), collective_bytes()
    for step in range(20):
        x = mine(8, 4, seed=step)
        gathered = allgather(x, "e4m3", rounding="stochastic", seed=step)
        mean = hvd.allreduce(x, compression=compressor)
        part = reduce_scatter(gathered, "e4m3")
        total = hvd.allreduce(torch.ones(1))
        assert gathered.shape[0] == 8 * SIZE and part.shape == mean.shape and total == 1
    sent = (collective_bytes() - before) / 20
    assert 2 * (SIZE - 1) * 32 <= sent < 2 * (SIZE - 1) * 32 + 300 * SIZE


def test_process_sets():
    """After it ranks have begun different numbers of operations: unnamed ones of Horovod no longer match."""
    pair = hvd.global_process_set if SIZE == 2 else hvd.add_process_set([0, 1])
    alone = hvd.add_process_set([SIZE - 1])
    if RANK in (0, 1):
        found = allgather(torch.full((2,), float(RANK)), "e4m3", process_set=pair)
        assert found.tolist() == [0.0, 0.0, 1.0, 1.0]
    if RANK == SIZE - 1:
        x = mine(3, 2)
        assert torch.equal(allgather(x, "e3m0", process_set=alone), x)
        assert torch.equal(reduce_scatter(x, "e3m0", process_set=alone), x)
    else:
        with pytest.raises(ValueError, match=f"rank {RANK} is not in the process set"):
            allgather(mine(2), "e4m3", process_set=alone)
    for one in (pair, alone):
        if one is not hvd.global_process_set:
            hvd.remove_process_set(one)


def test_ranks_in_join_are_told_of():
    """Last: a rank that has joined must not be waited for."""
    if RANK == 0:
        hvd.join()
    else:
        with pytest.raises(ValueError, match=r"1 of \d ranks are in hvd.join\(\)"):
            allgather(mine(3), "e4m3")
        hvd.join()
    assert allgather(torch.ones(1), "e4m3").sum() == SIZE


def test_ranks_have_different_devices(monkeypatch):
    """cuda:0 on one rank is cuda:1 on another: they meet, also with a second device of each. Oracle: as on one."""
    monkeypatch.setattr(for_torch, "kernels_for", lambda device: CpuKernels())
    monkeypatch.setattr(for_torch, "on", lambda device: torch.device("cpu"))  # which can be entered, too
    room, x = collectives._room, mine(9, seed=3)
    expected = allgather(x, "e4m3")
    for number in range(2):
        device = torch.device("cuda", (RANK + number) % SIZE)
        names = hvd.allgather_object(room(hvd.global_process_set, device)._name, name="rooms")
        assert len(set(names)) == 1, "they would never meet"
        monkeypatch.setattr(collectives, "_room", lambda process_set, _, device=device: room(process_set, device))
        assert torch.equal(allgather(x, "e4m3"), expected)
    names = {one._name for key, one in collectives._rooms.items() if key[2].type == "cuda"}
    assert len(names) == 2, "a device of its own has a conversation of its own"
