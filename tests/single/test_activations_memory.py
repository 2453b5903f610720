"""The pool in front of torch's allocator: tensors never overlap, pages are used again, what is free goes back.

Oracles: what was written to every living tensor, and the resident size that the kernel reports.
"""

import gc
import os
import random
import threading
import weakref
from pathlib import Path

import pytest
import torch

from horovod_aps.activations import ActivationCompressor, compress, decompress, memory

MB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture
def pool():
    found = memory.pool()
    assert found is not None, "the pool is not built for this torch: make setup"
    found.enter()
    yield found
    found.leave()


def test_pool_is_on_only_while_a_saver_lives():
    found = memory.pool()
    assert found is not None
    gc.collect()
    before = found.is_on
    saver = ActivationCompressor(torch.nn.Linear(2, 2), error_bound=0.1)
    assert found.is_on
    live, _ = found.count()
    x = torch.ones(MB)
    assert found.count()[0] == live + x.nbytes
    del saver
    gc.collect()
    assert found.is_on == before
    assert x.sum() == MB  # it stays where it is
    del x
    assert found.count()[0] == live
    assert not ActivationCompressor(torch.nn.Linear(2, 2), error_bound=0.1, trim=False).trim
    assert found.is_on == before


def test_pool_tensors_never_overlap(pool):
    """Tensors and streams of random sizes come and go; each still holds the number that was written to it."""
    rng = random.Random(0)
    held: dict[int, torch.Tensor] = {}
    live = pool.count()[0]
    for step in range(1500):
        if held and (len(held) > 30 or rng.random() < 0.45):
            key = rng.choice(list(held))
            tensor = held.pop(key)
            assert torch.all(tensor == key % 251)
            del tensor
        n = rng.choice([1, 100, (1 << 18) - 1, 1 << 18, (1 << 18) + 1, rng.randrange(1 << 18, 1 << 21)])
        made = pool.stream(n) if rng.random() < 0.5 else torch.empty(n, dtype=torch.uint8)
        assert made.data_ptr() % 64 == 0
        held[step] = made.fill_(step % 251)
    for key, tensor in held.items():
        assert torch.all(tensor == key % 251)
    del tensor, made
    held.clear()
    assert pool.count()[0] == live


def test_pool_uses_pages_again_and_keeps_no_more_than_was_in_use(pool):
    live, _ = pool.count()
    first = torch.ones(8 * MB)
    place = first.data_ptr()
    del first
    again = torch.ones(8 * MB)
    assert again.data_ptr() == place
    del again
    # What stays free and resident, with what is in use, is never more than the most that was in use, plus 16 MB.
    most = max(live + 32 * MB, live)
    rng = random.Random(1)
    held: list[torch.Tensor] = []
    for _ in range(200):
        if len(held) > 6:
            held.pop(rng.randrange(len(held)))
        size = rng.randrange(MB, 12 * MB)
        held.append((pool.stream(size) if rng.random() < 0.3 else torch.empty(size, dtype=torch.uint8)).fill_(1))
        now, idle = pool.count()
        most = max(most, now)
        assert now + idle <= most + 17 * MB


def test_pool_gives_free_pages_back():
    found = memory.pool()
    assert found is not None
    found.enter()
    start = resident()
    x = torch.ones(64 * MB)
    assert resident() > start + 250 * MB
    del x
    users = found._n_users
    found.leave()
    if users == 1:
        assert resident() < start + 20 * MB
        assert found.count()[1] == 0


def test_pool_works_in_threads_and_after_fork(pool):
    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            n = rng.randrange(1 << 17, 1 << 20)
            x = torch.full((n,), seed, dtype=torch.uint8)
            y = pool.stream(n).copy_(x)
            if not torch.equal(x, y):
                wrong.append(seed)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        child = os.fork()
        if not child:  # the lock is free here, whoever held it at that moment
            try:
                x = torch.empty(MB, dtype=torch.uint8)
                os._exit(0 if x.data_ptr() else 1)
            except BaseException:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()
    assert not wrong


def test_pool_gives_the_same_numbers_and_frees_with_the_tensor(pool):
    torch.manual_seed(0)
    x = torch.randn(1 << 20)
    packed = compress(x, 0.01)
    y = decompress(packed)
    assert (x - y).abs().max() <= 0.01
    died = weakref.ref(y)
    live = pool.count()[0]
    del y
    assert died() is None
    assert pool.count()[0] == live - x.nbytes
    shared = torch.ones(1 << 18).share_memory_()  # other allocators are not touched
    assert shared.is_shared()
    resized = torch.ones(1 << 18).resize_(1 << 19)
    assert resized[: 1 << 18].sum() == 1 << 18


def test_trim_is_what_is_left_without_a_pool(monkeypatch):
    """Where the pool was not built the resident size still follows what is in use."""
    monkeypatch.setattr(memory, "pool", lambda: None)
    stream = memory.apart(1 << 20)
    assert stream.numel() == 1 << 20
    stream.fill_(3)
    blocks = [torch.ones(1 << 18) for _ in range(150)]
    small = [torch.ones(64) for _ in range(10)]
    full = resident()
    del blocks
    memory._trimmer()._low = 0
    memory.trim()
    assert resident() < full - 100 * MB
    assert len(small) == 10
