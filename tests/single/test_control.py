"""What ranks conclude from what they say: the same on all of them, in whatever order messages arrive."""

from __future__ import annotations

import itertools
import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_aps.engine.control import CHOICE, HEADER, TALK, Header, Rounds, factors_digest, shared_exponents


def header(
    exponents: list[int], bucket: int = 0, plan: bytes = b"p" * 16, factors: tuple[float, ...] = (0.5,)
) -> bytes:
    return Header(plan, factors_digest(factors), bucket, np.array(exponents, np.int32)).encode()


def test_shared_exponents_are_the_largest_by_layer():
    shared = shared_exponents([header([1, -30000, 7]), header([2, -40000, -7]), header([0, 5, 7])])
    np.testing.assert_array_equal(shared, [2, 5, 7])
    assert len(shared_exponents([header([]), header([])])) == 0


@pytest.mark.parametrize(
    "other",
    [
        header([1, 2], bucket=1),
        header([1, 2], plan=b"q" * 16),
        header([1, 2], factors=(0.25,)),
        header([1]),
        b"",
        header([1, 2])[:-1],
    ],
    ids=["bucket", "plan", "factors", "number", "empty", "truncated"],
)
@pytest.mark.parametrize("place", [0, 2])
def test_shared_exponents_only_of_the_same_bucket(other, place):
    bodies = [header([1, 2])] * 3
    bodies[place] = other
    assert shared_exponents(bodies) is None


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_every_order_of_hearing(size):
    """Rank 0 hears two messages of each other rank, interleaved in every way that keeps each one's order."""
    others = [Rounds(rank, size) for rank in range(1, size)]
    said = {one.rank: [one.say(HEADER, bytes([one.rank, i])) for i in range(2)] for one in others}
    for order in set(itertools.permutations([rank for rank in said for _ in range(2)])):
        rounds, left = Rounds(0, size), {rank: deque(messages) for rank, messages in said.items()}
        rounds.say(HEADER, b"0")
        rounds.say(HEADER, b"1")
        concluded = []
        for rank in order:
            rounds.hear(rank, left[rank].popleft())
            while (conclusion := rounds.conclude()) is not None:
                concluded.append([body for _, body in conclusion])
        assert concluded == [[b"%d" % i, *(bytes([rank, i]) for rank in said)] for i in range(2)]
        assert rounds.answered


def test_rounds_concludes_nothing_before_this_rank_has_spoken():
    a, b = Rounds(0, 2), Rounds(1, 2)
    a.hear(1, b.say(TALK, b"x"))
    assert a.conclude() is None and a.answered and a.missing() == set() and [kind for kind, _ in a.asked] == [TALK]
    assert not b.answered and b.missing() == {0} and b.asked == []
    b.hear(0, a.say(CHOICE, b""))
    assert b.missing() == set()
    assert a.conclude() == b.conclude() == [(CHOICE, b""), (TALK, b"x")]
    assert a.asked == [] and b.answered


def test_rounds_what_was_said_before_an_epoch_ended_is_void():
    a, b = Rounds(0, 2), Rounds(1, 2)
    stale = [b.say(HEADER, b"0"), b.say(HEADER, b"1")]
    a.say(CHOICE, b"")
    a.hear(1, stale[0])
    assert a.conclude() is not None
    a.end_epoch()
    a.hear(1, stale[1])
    assert a.answered and a.asked == []
    a.say(TALK, b"new")
    assert a.conclude() is None and a.missing() == {1}


def test_rounds_keeps_what_is_said_for_an_epoch_that_has_not_begun_here():
    a, b = Rounds(0, 2), Rounds(1, 2)
    a.say(CHOICE, b"")
    first = b.say(HEADER, b"0")
    b.end_epoch()
    second = b.say(TALK, b"early")
    a.hear(1, first)
    a.hear(1, second)
    assert a.conclude() == [(CHOICE, b""), (HEADER, b"0")]
    assert a.conclude() is None
    a.end_epoch()
    assert [kind for kind, _ in a.asked] == [TALK]
    a.say(TALK, b"mine")
    assert a.conclude() == [(TALK, b"mine"), (TALK, b"early")]


@pytest.mark.parametrize("n", range(16))
def test_rounds_refuses_what_no_rank_says(n):
    message = Rounds(1, 2).say(TALK, b"")
    assert len(message) == 16
    with pytest.raises(ValueError, match=f"rank 1 has sent {n} bytes that are not of horovod_aps"):
        Rounds(0, 2).hear(1, message[:n])


@given(st.integers(2, 4), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_rounds_never_disagree(size, seed):
    """Ranks say what they like, several rounds ahead; messages are late at random, in order per pair of ranks.

    As in the exchange, a round in which ranks differ ends the epoch, and what was said ahead is void.
    """
    rng = random.Random(seed)
    ranks = [Rounds(rank, size) for rank in range(size)]
    lines = {(source, target): deque[bytes]() for source in range(size) for target in range(size) if source != target}
    history: list[list[tuple[int, list[tuple[int, bytes]]]]] = [[] for _ in range(size)]
    n_said = [0] * size
    n_messages = rng.randrange(1, 40)

    def speak(one: Rounds) -> None:
        n_said[one.rank] += 1
        kind = rng.choice([HEADER, HEADER, HEADER, TALK])
        message = one.say(kind, bytes([one.rank]) + rng.randbytes(rng.randrange(4)))
        for target in range(size):
            if target != one.rank:
                lines[one.rank, target].append(message)

    def conclude(one: Rounds) -> None:
        while (said := one.conclude()) is not None:
            history[one.rank].append((one.epoch, said))
            if len({kind for kind, _ in said}) > 1:
                one.end_epoch()

    for _ in range(100 * n_messages):
        one = rng.choice(ranks)
        if rng.random() < 0.2 and n_said[one.rank] < n_messages:
            speak(one)
        elif full := [source for source in range(size) if source != one.rank and lines[source, one.rank]]:
            source = rng.choice(full)
            one.hear(source, lines[source, one.rank].popleft())
        conclude(one)
    for (source, target), line in lines.items():
        while line:
            ranks[target].hear(source, line.popleft())
    # Whoever others wait for says something, until nobody waits.
    for _ in range(1000):
        for one in ranks:
            conclude(one)
        waiting = [one for one in ranks if not one.answered]
        if not waiting and all(not one.asked for one in ranks):
            break
        for one in ranks:
            if one.asked:
                speak(one)
        for (source, target), line in lines.items():
            while line:
                ranks[target].hear(source, line.popleft())
    else:
        raise AssertionError("ranks wait for ever")
    assert all(entries == history[0] for entries in history)
    assert len({one.epoch for one in ranks}) == 1
    for _, said in history[0]:
        assert [body[0] for _, body in said] == list(range(size)), "each rank's word is its own"
    assert all(not one._heard for one in ranks), "nothing is kept of what has been concluded"
