"""Bad luck that a job survives: joined ranks, threads, exceptions in hooks, copies of the compressor.

What ends a rank (kill -9, Ctrl-C) is in tests/test_faults.py.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from contextlib import suppress

import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError
from torch_common import assert_replicas_equal, loss_of, make_model

from horovod_aps.torch import APSCompressor
from horovod_aps.transports import mpi, sockets

hvd.init()


def wrap(model: torch.nn.Module, compressor: APSCompressor, prefix: str = "") -> torch.optim.Optimizer:
    named = [(prefix + name, p) for name, p in model.named_parameters()]
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=named, compression=compressor
    )


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()


@pytest.mark.parametrize("warm", [False, True])
def test_join_is_refused_and_says_what_to_do(warm):
    """Rank 0 has no data left: the others must not wait for it, nor average without it. Then all go on."""
    compressor = APSCompressor(4, 3)
    model = make_model()
    optimizer = wrap(model, compressor)
    if warm:
        train(model, optimizer, range(3))
    if hvd.rank() != 0:
        with pytest.raises(ValueError, match=r'in hvd.join\(\).*transport="allreduce"'):
            train(model, optimizer, range(3, 4))
    hvd.join()
    model = make_model()
    train(model, wrap(model, compressor), range(4))
    assert_replicas_equal(model)


def test_join_works_with_the_allreduce_transport():
    """Ranks run out of data one after the other. Oracle: joined ranks count as zeros in the average."""
    compressor = APSCompressor(4, 3, transport="allreduce")
    for step in range(4):
        if step > hvd.rank():
            break
        n_present = hvd.size() - step
        result = hvd.allreduce(torch.ones(100), name=f"j.{step}", op=hvd.Average, compression=compressor)
        torch.testing.assert_close(result, torch.full((100,), n_present / hvd.size()), rtol=1e-3, atol=0)
    hvd.join()


def test_exception_in_a_users_hook_on_one_rank():
    """The rank that failed finishes the step with what it has, as stock Horovod allows, and all go on."""
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3))
    train(model, optimizer, range(2))
    failing = hvd.rank() == hvd.size() - 1

    def hook(grad: torch.Tensor) -> None:
        raise KeyError("a user's mistake")

    handle = model[0].weight.register_hook(hook) if failing else None
    optimizer.zero_grad()
    loss = loss_of(model, 2, hvd.rank())
    if failing:
        with pytest.raises(KeyError, match="a user's mistake"):
            loss.backward()
        handle.remove()
    else:
        loss.backward()
    optimizer.step()
    assert_replicas_equal(model)
    train(model, optimizer, range(3, 6))
    assert_replicas_equal(model)


def test_exception_in_backward_on_all_ranks_and_a_new_optimizer():
    """The step is given up: nothing is flushed, the optimizer is dropped, the compressor goes on in a new one."""
    compressor = APSCompressor(4, 3)
    model = make_model()
    optimizer = wrap(model, compressor)
    train(model, optimizer, range(2))

    def hook(grad: torch.Tensor) -> None:
        raise KeyError("a user's mistake")

    handle = model[0].weight.register_hook(hook)
    with pytest.raises(KeyError):
        loss_of(model, 2, hvd.rank()).backward()
    handle.remove()
    optimizer.synchronize()
    optimizer.zero_grad()
    model = make_model(1)
    train(model, wrap(model, compressor), range(3))
    assert_replicas_equal(model)


def test_all_results_of_a_refused_batch_are_errors_and_ranks_go_on():
    """Rank 0 joins; the others take each result by itself, as one may with handles."""
    compressor = APSCompressor(4, 3)

    def reduce() -> list[float | str]:
        results: list[float | str] = []
        handles = []
        for name in "abc":
            wired, context = compressor.compress(torch.ones(5))
            handles.append((hvd.allreduce_async_(wired, name=name, op=hvd.Sum), context))
        for handle, context in handles:
            try:
                results.append(compressor.decompress(hvd.synchronize(handle), context)[0].item())
            except ValueError as error:
                results.append(str(error))
        return results

    assert reduce() == [hvd.size()] * 3
    if hvd.rank() != 0:
        assert all("hvd.join()" in str(one) for one in reduce())
    hvd.join()
    for _ in range(3):
        assert reduce() == [hvd.size()] * 3


@pytest.mark.parametrize("kernel", ["scan", "encode", "decode"])
def test_failure_of_one_rank_is_an_error_on_all(kernel, monkeypatch):
    """Rank 1 runs out of memory in the middle of a step, and its program goes on: nobody waits for it for ever."""
    compressor, model = APSCompressor(4, 3), make_model()
    optimizer = wrap(model, compressor)
    train(model, optimizer, range(2))

    def fail(*_, **__):
        raise MemoryError(f"{kernel} has failed")

    if hvd.rank() == 1:
        monkeypatch.setattr(next(iter(compressor._reducers.values())).kernels, kernel, fail)
    # What fails in decoding has sent its own before: the others may have all of this step.
    may_pass = suppress(HorovodInternalError) if kernel == "decode" and hvd.rank() != 1 else None
    with may_pass or pytest.raises((MemoryError, HorovodInternalError), match=f"{kernel} has failed"):
        train(model, optimizer, range(2, 3))
    monkeypatch.undo()
    with pytest.raises(HorovodInternalError, match=f"could not go on: MemoryError: {kernel} has failed"):
        hvd.allreduce(torch.ones(3), name="after", compression=compressor)
    model = make_model()
    train(model, wrap(model, APSCompressor(4, 3), "anew."), range(3))
    assert_replicas_equal(model)


def test_failure_during_backward_is_an_error_of_the_step(monkeypatch):
    """At the same place on all ranks, so that they go on together; a hook that raised would leave them apart."""
    model = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(6)])
    compressor = APSCompressor(4, 3, bucket_mb=0.04)
    optimizer = wrap(model, compressor)
    for module in model:
        module.weight.register_hook(lambda _: time.sleep(0.01))  # longer than between looks

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()

    for _ in range(2):
        backward()
        optimizer.step()
    kernels = next(iter(compressor._reducers.values())).kernels
    calls, scan = [], kernels.scan

    def fail(*args, **keywords):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("scan has failed")
        return scan(*args, **keywords)

    if hvd.rank() == 1:
        monkeypatch.setattr(kernels, "scan", fail)
    backward()
    with pytest.raises((MemoryError, HorovodInternalError), match="scan has failed"):  # of memory, if ranks met late
        optimizer.step()
    for _ in range(2):
        with pytest.raises(HorovodInternalError, match="scan has failed"):
            hvd.allreduce(torch.ones(3), name="after", compression=compressor)
    assert torch.all(hvd.allreduce(torch.ones(3), name="anew", compression=APSCompressor(4, 3)) == 1)


def test_two_models_in_two_threads():
    """Two trainings at once, each with its own compressor. Oracle: the same trainings one after the other."""
    compressors = [APSCompressor(4, 3), APSCompressor(5, 2)]
    alone = [make_model(seed) for seed in range(2)]
    for i, model in enumerate(alone):
        train(model, wrap(model, APSCompressor(*[(4, 3), (5, 2)][i]), f"alone{i}."), range(10))
    together = [make_model(seed) for seed in range(2)]
    optimizers = [
        wrap(model, compressor, f"thread{i}.") for i, (model, compressor) in enumerate(zip(together, compressors))
    ]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            train(together[i], optimizers[i], range(10))
        except BaseException as error:
            errors.append(error)

    # The other way round on every second rank: which thread comes first must not matter.
    order = (0, 1) if hvd.rank() % 2 else (1, 0)
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for model, wanted in zip(together, alone):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted.parameters()))


def test_many_compressors_meet_at_the_same_time():
    """Each connects its ranks in a thread of its own, in any order: none may hold up another one. Oracle: the sum."""
    compressors, results = [APSCompressor(4, 3) for _ in range(8)], {}

    def work(i: int) -> None:
        x = torch.full((5,), float(2 ** (hvd.rank() + i)))
        results[i] = hvd.allreduce(x, name=f"many{i}", op=hvd.Sum, compression=compressors[i])

    order = [(3 * i + hvd.rank()) % len(compressors) for i in range(len(compressors))]
    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    for i in range(len(compressors)):  # sums of powers of two that four bits hold
        assert torch.equal(results[i], torch.full((5,), float(2**i * (2 ** hvd.size() - 1))))


def test_end_of_a_forked_child_is_not_that_of_the_rank():
    """A child that ends as programs do runs what is to run at its end; the connections that it has are its parent's."""
    model = make_model()
    optimizer = wrap(model, APSCompressor(4, 3))
    train(model, optimizer, range(2))
    child = os.fork()
    if child == 0:
        try:
            sockets.farewells.take_leave()
            mpi._leave()
        finally:
            os._exit(0)  # Horovod's own end would wait for threads that a child has not got
    os.waitpid(child, 0)
    train(model, optimizer, range(2, 5))
    assert_replicas_equal(model)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("used", [False, True])
def test_copies_of_a_compressor_work_and_carry_its_state(how, used):
    """The copy of a used compressor goes on as the original does: same residuals, same seed position."""
    original = APSCompressor(3, 1, error_feedback=True, rounding="stochastic")
    x = torch.linspace(-1, 1, 100) + hvd.rank()
    if used:
        for _ in range(3):
            hvd.allreduce(x, name="c", compression=original)
    twin = copy.deepcopy(original) if how == "deepcopy" else pickle.loads(pickle.dumps(original))
    first, second = (hvd.allreduce(x, name="c", compression=c) for c in (original, twin))
    assert torch.equal(first, second)
    assert repr(twin) == repr(original)


def test_hvd_shutdown_and_init_again():
    """Nothing from the old world survives; the same compressor works in the new one. Last: it ends the old world.

    Over MPI only if mpi4py has started it: Horovod ends what it has started itself, and MPI cannot begin again.
    """
    if hvd.mpi_enabled() and os.environ.get("HOROVOD_APS_TEST_MPI") != "mpi4py":
        return
    compressor = APSCompressor(4, 3)
    assert torch.all(hvd.allreduce(torch.ones(10), name="w", compression=compressor) == 1)
    hvd.shutdown()
    hvd.init()
    for _ in range(2):
        assert torch.all(hvd.allreduce(torch.ones(10), name="w", compression=compressor) == 1)
