"""Operations without names begin in the order of rank 0, whatever the order in which ranks come to them.

Oracle: operations that are matched by their order alone, as those of a process group are, and look at what they match.
"""

from __future__ import annotations

import numpy as np
import pytest

from horovod_aps.transports.local import LocalTransport
from horovod_aps.transports.turns import TurnTransport


class InOrder:
    """The n-th operation of a rank meets the n-th of all others."""

    def __init__(self, rank: int, begun: list[list[tuple[str, list[np.ndarray], list[int]]]]) -> None:
        self.rank, self.begun, self.way = rank, begun, "in order"

    def takes(self, array):
        return True

    def alltoall_sized(self, parts, sizes):
        return self._begin("alltoall", list(parts), sizes)

    def allgather_sized(self, part, sizes):
        return self._begin("allgather", [part] * len(self.begun), sizes)

    def close(self):
        pass

    def _begin(self, kind, parts, sizes):
        self.begun[self.rank].append((kind, parts, list(sizes)))
        return Begun(self, len(self.begun[self.rank]) - 1)


class Begun:
    def __init__(self, owner: InOrder, number: int) -> None:
        self.owner, self.number = owner, number

    def done(self):
        return all(len(one) > self.number for one in self.owner.begun)

    def put(self, places):
        met = [one[self.number] for one in self.owner.begun]
        assert len({kind for kind, _, _ in met}) == 1, "different operations meet"
        got = [parts[self.owner.rank] for _, parts, _ in met]
        assert [len(part) for part in got] == met[self.owner.rank][2], "something else comes than was expected"
        row = np.concatenate(got)
        for start, array in places:
            array[:] = row[start : start + len(array)]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_come_in_different_orders_get_what_was_sent_to_them(size):
    begun = [[] for _ in range(size)]
    ranks = [TurnTransport(one, InOrder(one.rank, begun)) for one in LocalTransport.world(size)]
    n_moves, moves, filled = 6, [], {}
    for me in ranks:
        others = [k for k in range(size) if k != me.rank]
        order = np.random.default_rng(me.rank).permutation(n_moves)
        for number in order.tolist():  # even ones send the same to all
            n = 3 + number
            same = np.full(n, 10 * number + me.rank, np.uint8)
            sent = {
                k: same if number % 2 == 0 else np.full(n, 10 * number + me.rank + 100 * k, np.uint8) for k in others
            }
            incoming = filled[me.rank, number] = {k: np.zeros(n, np.uint8) for k in others}
            moves.append(me.transfer(sent, incoming, number))
    ranks[0].post(b"hello")
    heard = []
    for _ in range(4 * n_moves):
        for me in ranks:
            heard += me.heard()
        if all([move.done() for move in moves]):
            break
    assert all(move.done() for move in moves)
    assert heard == [(0, b"hello")] * (size - 1)  # turns are none of the engine's business
    for (rank, number), incoming in filled.items():
        for k, array in incoming.items():
            extra = 100 * rank if number % 2 else 0
            assert (array == 10 * number + k + extra).all()
    assert len({str([kind for kind, _, _ in one]) for one in begun}) == 1
