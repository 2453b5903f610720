"""The APS exchange: what happens between a gradient handed in and the same gradient reduced over all ranks.

    submit -> plan -> scan -> header (exponents) -> reduction -> result

Frontends `submit` layers as their gradients become ready and `wait` for results. Buckets of a batch that ranks have
seen before start on their way as soon as they are full; a new batch is talked about when a rank waits for it. Ranks may
submit in any order, and wait for the results of different exchanges in any order: whoever waits keeps all exchanges of
the process moving (`progress`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np

from horovod_aps import cores, timeline
from horovod_aps.engine import agreement, progress
from horovod_aps.engine.auto import AutoChooser, format_table
from horovod_aps.engine.control import CHOICE, HEADER, TALK, Header, Rounds, factors_digest, shared_exponents
from horovod_aps.engine.feedback import Lender, Residuals
from horovod_aps.engine.flight import Flight, Job, Plan
from horovod_aps.engine.layer import Layer
from horovod_aps.engine.layout import LayerSpec
from horovod_aps.engine.pool import Lease, Pool
from horovod_aps.engine.reductions import ChooseReduction
from horovod_aps.engine.reductions.base import N_TAGS, Reduction, Work
from horovod_aps.engine.statistics import Statistics
from horovod_aps.errors import LostPeer, OutOfSharedMemory, cannot_go_on, failure_of, named
from horovod_aps.kernels import EXP_ZERO
from horovod_aps.log import logger, trace
from horovod_aps.options import Options
from horovod_aps.transports.base import Transport
from horovod_aps.transports.hosts import Hosts
from horovod_aps.transports.memory import Room

MAX_PLANS = 64  # batches remembered; an older one is talked about anew when it comes back
LOOK_SECONDS = 500e-6  # between looks from within backward
MAX_FLYING = 256  # buckets on their way at the same time; looking at all of them takes time
MAX_SERIAL = 4096  # after so many buckets tags are used again
CORES = cores.count()
_NONE = np.zeros(0, np.int32)


class Tickets(Protocol):
    """How a frontend has all ranks come before anything starts."""

    @property
    def number(self) -> int:
        """Of the newest ticket."""

    def open_until(self, number: int) -> None:
        """Open all tickets up to this number, for ranks that wait for them."""

    def overdue(self, asked: bool) -> bool:
        """Whether to nudge others to open the newest one: after a while, at once if they have `asked` something."""


class Exchange:
    """APS all-reduce of batches of layers among the ranks of one process set."""

    def __init__(
        self,
        kernels: Any,
        transport: Transport | None,
        options: Options,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        overlap: bool = False,
        choose_reduction: ChooseReduction | None = None,
    ) -> None:
        """Made without a transport if the ranks have not met yet; `context` is for whoever launches its kernels.

        With `overlap` buckets of a known batch start as soon as they are full, before anybody waits.
        `choose_reduction`, if given, says how each bucket of a new plan is reduced, in the same way on all ranks.
        """
        self.options = options
        self.kernels = kernels
        self.context = context
        self._overlap, self.choose_reduction = overlap, choose_reduction
        self.statistics = Statistics()
        self.step_number = 0
        self.gate: Callable[[], bool] | None = None
        """If set, no bucket is spoken of before it returns True; for a frontend that first asks who is there."""
        self.any_thread = True
        """Whether the progress thread may launch its kernels."""
        self.is_active = False
        """Whether `progress` knows that it holds something."""
        self.self_driven = False
        """Whether its frontend moves it on, in a thread of its own, and nobody else may."""
        self.on_break: Callable[[str], None] | None = None
        """If set, called with the reason when this rank cannot go on; for one of several that share a transport."""
        self._is_auto = options.overrides == "auto"
        self._chooser = AutoChooser(options) if self._is_auto else None
        self._residuals = Residuals(kernels)
        self._pool = Pool(kernels.alloc)
        self._lock = threading.RLock()
        self._next_look = 0.0
        self._loaded: tuple[dict[str, Any], Lender | None] | None = None
        self._submitted: dict[str, Layer] = {}  # handed in, perhaps by another thread, and not looked at
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._start_over()
        self._serial = 0  # of the next bucket that is agreed on
        self._nudged = 0  # the ticket that others wait for
        self._broken: Callable[[], LostPeer] | None = None  # if it cannot go on with these ranks
        self.n_talks = 0
        self.tickets: Tickets | None = None
        """Where the frontend asks other ranks to come, if it does."""
        self.transport: Transport | None = None
        self.network: Transport | None = None
        """The transport that it was given, without what brings messages of a device there."""
        if transport is not None:
            self.connect(transport)

    def _start_over(self) -> None:
        """Know nothing of other ranks, and hold nothing."""
        self._pending: dict[str, Layer] = {}  # handed in and not agreed on
        self._plan_of: dict[str, Plan] = {}  # of the batch that a layer was last seen in
        self._plans.clear()
        self._flight: Flight | None = None
        self._jobs: list[Job] = []
        self._must_talk = self._talking = self._choosing = False
        self._talked: set[str] = set()
        self._asked: tuple[tuple[bytes, ...], set[str]] = ((), set())  # what others talk about

    def connect(self, transport: Transport) -> None:
        """Go on with the ranks that `transport` joins; what was learned from others is forgotten."""
        with self._lock:
            held = [*self._pending.values()]
            self._drop_jobs()
            self._start_over()
            self._pending.update((layer.name, layer) for layer in held)
            if self.transport is not None and self.network is not transport:
                self.transport.close()
            self.network, self.transport = transport, self.kernels.reach(transport)
            self._rounds = Rounds(transport.rank, transport.size)
            self._serial = self._nudged = 0
            self._broken = None

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing."""
        # In this order, that of their way: another thread may move them on meanwhile.
        return not (self._submitted or self._pending or self._flight or self._jobs)

    @property
    def _hosts(self) -> Hosts | None:
        """Who shares a host, once that is known."""
        return None if self.transport is None else self.transport.hosts

    @property
    def is_crowded(self) -> bool:
        """Whether the ranks of this host, with Horovod's threads, outnumber its cores."""
        hosts = self._hosts
        return hosts is not None and CORES.are_few(2, len(hosts.ranks[hosts.host]))

    @property
    def is_near(self) -> bool:
        """Whether all ranks are on this host, which has a core for each: answers come within microseconds."""
        hosts = self._hosts
        return hosts is not None and len(hosts.ranks) == 1 and not CORES.are_few(1, len(hosts.ranks[0]))

    @property
    def room(self) -> Room | None:
        """The memory that the ranks of this host share, if they do."""
        hosts = self._hosts
        return None if hosts is None else hosts.room

    @property
    def waits_nearby(self) -> bool:
        """Whether all that is on its way waits for ranks of this host, which wake those that rest (`room`)."""
        agreed = self._flight is None or self._flight.is_agreed
        return agreed and bool(self._jobs) and all(job.waits_nearby for job in self._jobs)

    @property
    def way(self) -> str:
        """How gradients travel between hosts, for people; empty while that is not known."""
        if self.transport is None:
            return ""
        hosts, from_device = self.transport.hosts, getattr(self.transport, "way", "")
        between = ""
        if hosts is not None:
            level = "two-level by messages" if hosts.room is None else "two-level"
            between = f"flat ({hosts.why_flat})" if hosts.why_flat else f"{level} ({hosts})"
        return ", ".join(filter(None, (between, from_device)))

    def close(self) -> None:
        """Nobody will use it again."""
        progress.remove(self)
        with self._lock, self.context():  # in a thread that has used no device yet, CuPy would go back to the first
            self._drop_jobs()
            self._jobs, self._flight = [], None
        if self.transport is not None:
            self.transport.close()

    # ---- handing in and taking out ------------------------------------------------------------------------

    def submit(self, *layers: Layer) -> None:
        """Hand in gradients; full buckets of a known batch start on their way soon. Never blocks."""
        submitted, pending = self._submitted, self._pending
        for layer in layers:  # all of a group, or nothing
            if layer.name in submitted or layer.name in pending:
                raise _twice(layer)
        for layer in layers:
            if submitted.setdefault(layer.name, layer) is not layer:  # another of the group, or of this very moment
                for other in layers[: layers.index(layer)]:
                    submitted.pop(other.name, None)
                raise _twice(layer)
        if self.self_driven:
            return
        if time.perf_counter() >= self._next_look:
            self.look_in_passing()
        if not self.is_active:
            progress.add(self)

    def look_in_passing(self) -> None:
        """Move on what is on its way, unless another thread does; an error goes to whoever waits for results."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._jobs or self._flight is None or self._flight.may_start(len(self._submitted)):
                with self.context():
                    self._take_in()
                    if self._jobs or (self._flight is not None and self._flight.may_start(0)):
                        try:
                            self._advance()
                        except Exception as error:  # they wait at the same place on all ranks
                            self._fail(error)
        finally:
            self._next_look = time.perf_counter() + LOOK_SECONDS
            self._lock.release()

    def _take_in(self) -> ValueError | None:
        """Note what was handed in; returns what is wrong with a layer of it, which has that as its error already."""
        submitted, pending = self._submitted, self._pending
        if not submitted:
            return None
        taken = submitted.copy()
        twice = None
        if not pending.keys().isdisjoint(taken):  # by threads that do not see each other
            for name in pending.keys() & taken.keys():
                twice = _twice(taken.pop(name))
                del submitted[name]
        pending.update(taken)
        for name in taken:  # not before they are pending: `is_idle` must find them here or there
            submitted.pop(name, None)
        if self._flight is not None:
            self._flight.arrive(taken)
        elif taken:
            self._guess()
        return twice

    def _take_in_or_raise(self) -> None:
        """For whoever may get an error of a layer that is perhaps not its own."""
        if (twice := self._take_in()) is not None:
            raise twice

    def _guess(self) -> None:
        """Begin the batch that the first pending layer was last seen in."""
        if self._overlap and self._pending and self._may_board():
            plan = self._plan_with(next(iter(self._pending)))
            if plan is not None:
                self._flight = Flight.of(plan, self._pending)

    def look(self) -> bool:
        """Move on what is on its way and start what may start; True if anything moved. For a frontend's own thread."""
        with self._lock:
            return self._move_on()

    @property
    def is_travelling(self) -> bool:
        """Whether it waits for the network rather than for its frontend."""
        return self.transport is None or bool(self._jobs) or not self._rounds.answered

    def forget_plans(self) -> None:
        """Talk about the next batch anew, in the order in which it comes; between batches, on all ranks alike."""
        with self._lock:
            self._plans.clear()
            self._plan_of.clear()

    def wait(self, layers: Sequence[Layer] | None = None) -> None:
        """Until these layers have their results; all that was submitted if None.

        With None, what was submitted is a whole batch: ranks that have submitted anything else all get a ValueError.
        """
        with self.context():
            progress.run(self, self.steps(layers))
            self.kernels.end()

    def steps(self, layers: Sequence[Layer] | None = None) -> Generator[bool, None, None]:
        """`wait` in steps that never block, for a caller that drives several exchanges at once."""
        with self._lock:
            self._take_in_or_raise()
            wanted = self._held() if layers is None else list(layers)
        while True:
            with self._lock:
                moved = self._move_on()
                for layer in wanted:
                    if layer.error is not None:
                        raise layer.error
                if all(layer.done for layer in wanted) and not self._choosing:
                    self._end_wait()
                    return
                if self._is_stuck(wanted):
                    self._board_or_talk(waits=True, whole=layers is None)
                    moved = True
            yield moved

    def _held(self) -> list[Layer]:
        """All layers that were handed in and have no result yet."""
        return [*self._pending.values(), *(layer for job in self._jobs for layer in job.work.layers)]

    def _move_on(self) -> bool:
        try:
            self._take_in_or_raise()
            return self._advance()
        except LostPeer as error:
            self._fail(error)
            raise

    def _end_wait(self) -> None:
        if not (self._jobs or self._pending or self._choosing):
            progress.remove(self)
            if not self._submitted:
                self._load_now()
            elif not self.self_driven:  # in this very moment, by another thread
                progress.add(self)

    def drive(self, impatient: bool, launch: bool = True) -> bool:
        """Move on while somebody waits for another exchange; answers ranks that wait for this one.

        A rank that hands in more later answers when it holds all that others wait for, or at once if `impatient`: then
        they have what all hold, and must talk again about the rest. Without `launch` no kernel is launched.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            with self.context():
                self._take_in()
                if not launch:
                    return self._step(lambda _: self.listen())
                moved = self._advance()
                if self.transport is not None and (asked := self._rounds.asked):
                    moved |= self._answer(asked, impatient)
                self._end_wait()
                return moved
        except Exception as error:
            self._fail(error)
            return True
        finally:
            self._lock.release()

    def _answer(self, asked: list[tuple[int, bytes]], impatient: bool) -> bool:
        """Say something to ranks that have spoken in a round in which this one has not, if there is anything to say."""
        if not self._pending or self._choosing or not self._gate_is_open():
            return False
        if self._flight is None and self._may_board() and self._board():
            return True
        if set(self._pending) == self._talked or (self._flight is not None and not impatient):
            return False
        bodies = tuple(body for kind, body in asked if kind == TALK)
        if bodies and bodies != self._asked[0]:  # reading takes long
            self._asked = (bodies, {name for one in agreement.parse_all(bodies) for name in one.layers})
        if impatient or (bodies and self._asked[1] <= self._pending.keys()):
            self._talk(waits=False, whole=False)
            return True
        return False

    # ---- state --------------------------------------------------------------------------------------------

    def names(self) -> set[str]:
        """What people call the layers of the batches that are remembered."""
        return {spec.shown for plan in self._plans.values() for spec in plan.specs}

    @property
    def residuals(self) -> Mapping[str, Any]:
        """What rounding has lost, by layer; parts of one as "name[first:last]"."""
        return self._residuals.arrays

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The formats that overrides="auto" has chosen; None while it measures, and without it."""
        return dict(self.options.overrides) if self._is_auto and self._chooser is None else None  # type: ignore

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change options between steps, in the same way on all ranks; overrides by hand put an end to "auto"."""
        changes = {name: value for name, value in changes.items() if getattr(self.options, name) != value}
        if changes:
            self.options = self.options.replace(**changes)
        if "overrides" in changes:
            self._is_auto = changes["overrides"] == "auto"
            self._chooser = AutoChooser(self.options) if self._is_auto else None

    def state(self) -> dict[str, Any]:
        """Residuals and schedule position, as plain arrays and numbers."""
        if self.options.error_feedback and (self._pending or self._jobs or self._submitted):
            raise ValueError(
                "APSCompressor: with error_feedback the state is in flux between backward and step; call "
                "state_dict() after optimizer.step()"
            )
        measured = None if self._chooser is None else self._chooser.state()
        with self.context():
            residuals = self._residuals.state()
        return {
            "step_number": self.step_number,
            "residuals": residuals,
            "overrides": self.chosen,
            "auto": measured,
        }

    def load_state(self, state: dict[str, Any], lender: Lender | None = None) -> None:
        """Go on from a `state()`; what is on its way finishes first.

        Formats that "auto" had chosen are for "auto" only, the user's own come first. Residuals that the state lacks
        are asked of the lender when their layers come.
        """
        with self._lock, self.context():
            self._loaded = state, lender
            if not (self._pending or self._jobs or self._submitted):
                self._load_now()

    def _load_now(self) -> None:
        if self._loaded is None:
            return
        (state, lender), self._loaded = self._loaded, None
        self.step_number = state["step_number"]
        self._residuals.load(state["residuals"], lender)
        if self._is_auto and state["overrides"] is not None:
            self.options = self.options.replace(overrides=state["overrides"])
            self._chooser = None
        elif self._chooser is not None and state.get("auto"):
            self._chooser.load_state(state["auto"])

    def forget(self) -> None:
        """Drop everything that was learned from the present ranks, for a changed world."""
        with self._lock, self.context():
            self._submitted.clear()
            for layer in self._pending.values():
                self._residuals.drop(layer)
            self._drop_jobs()
            self._start_over()
            progress.remove(self)
            self._load_now()

    def _drop_jobs(self) -> None:
        """Keep the memory of what is on its way for good: the network may still write into it."""
        works = [job.work for job in self._jobs]
        scanned = [] if self._flight is None else self._flight.works[self._flight.n_agreed :]
        if works or scanned:
            self._quiet()
            _abandoned.extend(job.memory for job in self._jobs)
            for work in scanned:  # of these nothing has been sent
                work.lease.end()
            for work in works + scanned:
                for layer in work.layers:
                    self._residuals.drop(layer)

    def _give_up(self, job: Job, error: BaseException) -> None:
        """A bucket on its way has failed; its memory is kept, too."""
        self._quiet()
        self._jobs.remove(job)
        _abandoned.append(job.memory)
        for layer in job.work.layers:
            layer.error = error
            self._residuals.drop(layer)

    def _quiet(self) -> None:
        """Have no kernel work on residuals that are dropped; what has gone wrong on a device is known already."""
        try:
            self.kernels.drain()
        except Exception as error:
            logger.debug("waiting for kernels after an error: %s", error)

    def _fail(self, error: BaseException) -> None:
        """Everything that was handed in and not agreed on has failed; the next batch starts afresh on all ranks."""
        self._quiet()
        for layer in self._pending.values():
            layer.error = error
            self._residuals.drop(layer)
        self._pending.clear()
        if isinstance(error, LostPeer):
            for job in self._jobs:
                for layer in job.work.layers:
                    layer.error = error
            self._drop_jobs()
            self._jobs, self._flight = [], None
            progress.remove(self)
        self._end_flight()
        self._must_talk = self._talking = self._choosing = False
        self._talked = set()
        if self.transport is not None:
            self._rounds.end_epoch()

    # ---- the conversation with the other ranks ------------------------------------------------------------

    def _gate_is_open(self) -> bool:
        if self.gate is not None and self.gate():
            self.gate = None
        return self.gate is None

    def _advance(self) -> bool:
        """Move on all that can; True if anything moved."""
        if self._broken is None:
            self._gate_is_open()  # may connect us
        return self._step(self._go_on)

    def _step(self, step: Callable[[Transport], bool | None]) -> bool:
        """Take a step, once ranks are connected; if anything fails here, the others get an error, too."""
        if self._broken is not None:
            raise self._broken()
        if self.transport is None:
            return False
        try:
            return bool(self.transport.ready() and step(self.transport))
        except LostPeer:
            raise
        except OutOfSharedMemory as error:  # the same on all ranks
            raise self._break(error) from None
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> LostPeer:
        """This rank cannot go on, and nobody without it: messages of buckets on their way would meet later ones."""
        assert self.transport is not None
        why = failure_of(error)
        failure = cannot_go_on("this rank", why.encode())
        self._broken = partial(type(failure), str(failure))
        tells = [partial(self.transport.post, self._rounds.failure(why))]
        if self.on_break is not None:
            tells.append(partial(self.on_break, why))
        for tell in tells:
            try:
                tell()
            except Exception as second:  # perhaps there is no connection yet
                logger.debug("telling others of an error: %s", second)
        self._fail(failure)
        return failure

    def _go_on(self, transport: Transport) -> bool:
        """Listen, conclude, start buckets that may start, and move on those on their way; True if anything moved."""
        moved = self._launch_full()  # headers first: they would wait behind the data of buckets that are agreed on
        self.listen()
        while (said := self._rounds.conclude()) is not None:
            try:
                self._conclude(said)
            except ValueError as error:
                self._fail(named(error, self.options.who))
            moved = True
        left = set(transport.gone())  # before flags are looked at: a rank sets its own before it leaves
        if left and (gone := self._rounds.missing() & left):
            raise LostPeer(f"rank {min(gone)} has ended while this rank waits for it")
        for job in self._jobs:
            try:
                moved |= job.step()
            except OutOfSharedMemory:  # which ends all jobs in the same way
                raise
            except BaseException as error:
                self._give_up(job, error)
                raise
            if left and (gone := left & job.behind(transport.hosts)):
                raise LostPeer(f"rank {min(gone)} has ended while this rank waits for it")
        if moved:
            self._end_jobs()
        return moved

    def listen(self) -> None:
        """Take in what others have said, and answer nudges; launches nothing."""
        assert self.transport is not None
        for rank, message in self.transport.heard():
            try:
                self._nudged = max(self._nudged, self._rounds.hear(rank, message))
            except LostPeer as error:
                self._broken = partial(type(error), str(error))
                raise
        if self.tickets is not None:
            if self._pending and self._nudged:
                # A rank that holds tensors will be there; its program may wait for what the other has not begun. Before
                # a bucket is agreed on: afterwards this rank may never come back, and Horovod waits on the other.
                self.tickets.open_until(self._nudged)
            if self.tickets.overdue(bool(self._rounds.asked)):
                self.transport.post(self._rounds.nudge(self.tickets.number))

    def _conclude(self, said: list[tuple[int, bytes]]) -> None:
        """All ranks have spoken in a round."""
        kinds, bodies = {kind for kind, _ in said}, [body for _, body in said]
        if kinds == {HEADER} and (exponents := shared_exponents(bodies)) is not None:
            self._agree(exponents)
        elif kinds == {TALK}:
            self._settle(bodies)
        elif kinds == {CHOICE}:
            self._settle_choice(bodies)
        else:
            trace("ranks say different things; all describe what they hold")
            self._rounds.end_epoch()
            self._end_flight()
            self._must_talk, self._talking = True, False
            self._talked = set()
            if self._choosing:
                self._choose()

    def _say(self, kind: int, body: bytes) -> None:
        assert self.transport is not None
        self.transport.post(self._rounds.say(kind, body, self.tickets.number if self.tickets is not None else 0))

    def _end_flight(self) -> None:
        """Give up the buckets that were not agreed on; their layers are pending still."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        given_up = flight.works[flight.n_agreed :]
        if not all([work.scanned.done() for work in given_up]):
            self.kernels.drain()  # nothing writes any more into memory that others get now
        for work in given_up:
            work.lease.end()
        for name in flight.plan.places:  # the guess was wrong
            if self._plan_of.get(name) is flight.plan:
                del self._plan_of[name]

    def _is_stuck(self, wanted: Iterable[Layer]) -> bool:
        """Whether a wanted layer waits for something that only a talk can bring."""
        if self._talking or self._choosing or self.transport is None or not self.transport.ready():
            return False
        if not self._gate_is_open() or not self._rounds.answered:
            return False
        flight = self._flight
        if flight is not None and (flight.next_is_full or flight.is_launched or flight.is_scanning):
            return False
        return any(layer.name in self._pending for layer in wanted)

    def _may_board(self) -> bool:
        return not (self._must_talk or self._talking or self._choosing)

    def _board_or_talk(self, waits: bool, whole: bool) -> None:
        if self._flight is None and self._may_board() and self._board():
            return
        self._talk(waits, whole)

    def _board(self) -> bool:
        """Start the flight of all that is pending, if that is a batch that ranks have seen before."""
        plan = self._plan_with(next(iter(self._pending)))
        if plan is None or plan.places.keys() != self._pending.keys():
            plan = self._plans.get(agreement.describe(self._specs(self._pending.values()), self.options))
        if plan is None:
            return False
        flight = Flight.of(plan, self._pending)
        if any(flight.missing):
            return False
        plan.options, plan.warm = self.options, self._is_warm()
        self._plan_of.update((spec.name, plan) for spec in plan.specs)
        self._flight = flight
        return True

    def _talk(self, waits: bool, whole: bool) -> None:
        """Describe what this rank holds."""
        layers = [*self._pending.values()]
        trace("talking about %d layers", len(layers))
        self.n_talks += 1
        self._talking, self._talked = True, set(self._pending)
        self._say(
            TALK,
            agreement.proposal(
                self._specs(layers),
                [layer.factor for layer in layers],
                self.options,
                step_number=self.step_number,
                chosen=self.chosen,
                waits=waits,
                whole=whole,
            ),
        )

    def _settle(self, messages: list[bytes]) -> None:
        """Start the flight of what all ranks hold."""
        self._talking = False
        proposals = agreement.parse_all(messages)
        ahead = agreement.most_advanced(proposals)
        if ahead is not None:  # the same on all ranks, so all of them talk again
            self._catch_up(*ahead)
            mine = proposals[self._rounds.rank]
            self._talk(mine.waits, mine.whole)
            return
        names = agreement.settle(proposals)
        self._check_hierarchy()
        trace("way: %s", self.way)
        self._must_talk = False
        self._end_flight()
        if names:
            layers = {name: self._pending[name] for name in names}
            self._flight = Flight.of(self._remember(self._specs(layers.values())), layers)

    def _check_hierarchy(self) -> None:
        """Raise ValueError, on all ranks, if two levels are wanted and cannot be."""
        assert self.transport is not None
        hosts = self.transport.hosts
        if self.options.hierarchy == "two-level" and (hosts is None or hosts.why_flat):
            why = "the ranks' hosts are not known" if hosts is None else hosts.why_flat
            raise ValueError(f'APSCompressor: hierarchy="two-level" cannot be: {why}')

    def _catch_up(self, step_number: int, chosen: dict[str, Any] | None) -> None:
        """Go on where the most advanced rank is: this rank may have joined an elastic job just now."""
        trace("going on at step %d instead of %d", step_number, self.step_number)
        self.step_number = step_number
        if self._is_auto and chosen is not None:
            overrides = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
            self.options = self.options.replace(overrides=overrides)
            self._chooser = None

    def _specs(self, layers: Iterable[Layer]) -> list[LayerSpec]:
        warm = self._is_warm()
        return [agreement.spec_of(layer, self.options, warm) for layer in layers]

    def _is_warm(self) -> bool:
        return self.step_number < self.options.warmup_steps or self._chooser is not None

    def _plan_with(self, name: str) -> Plan | None:
        """The plan of the batch that the layer was last seen in, if its formats still hold."""
        plan = self._plan_of.get(name)
        if plan is None or plan.options is not self.options or plan.warm != self._is_warm():
            return None
        return plan

    def _remember(self, specs: list[LayerSpec]) -> Plan:
        assert self.transport is not None
        description = agreement.describe(specs, self.options)
        plan = self._plans[description] = Plan(
            specs,
            description,
            self.transport,
            self.options,
            self._is_warm(),
            self.choose_reduction,
        )
        if len(self._plans) > MAX_PLANS:
            _, oldest = self._plans.popitem(last=False)
            self._plan_of = {name: plan for name, plan in self._plan_of.items() if plan is not oldest}
        self._plan_of.update((spec.name, plan) for spec in specs)
        return plan

    # ---- overrides="auto" ---------------------------------------------------------------------------------

    def _choose(self) -> None:
        """End of the measuring steps: propose every layer's format."""
        assert self._chooser is not None and self.transport is not None
        self._choosing = True
        hosts, n_rounding = self._hosts, self.transport.size
        if hosts is not None and not hosts.why_flat and self.choose_reduction is None:  # as all ranks know
            n_rounding = hosts.n_hosts
        self._say(CHOICE, self._chooser.proposal(n_rounding))

    def _settle_choice(self, messages: list[bytes]) -> None:
        assert self._chooser is not None and self.transport is not None
        self._choosing = False
        overrides = self._chooser.settle(messages)
        self.options = self.options.replace(overrides=overrides)
        self._chooser = None
        if self.transport.rank == 0:
            logger.warning('formats chosen by overrides="auto":\n%s', format_table(overrides))

    # ---- buckets ------------------------------------------------------------------------------------------

    def _launch_full(self) -> bool:
        """Start the buckets that are full, in order."""
        if self._flight is None:
            self._guess()
        flight = self._flight
        if flight is None or self._talking or self._choosing:
            return False
        may_speak = self._gate_is_open()
        if not (may_speak or self._may_scan_early):
            return False
        moved = may_speak and self._send_headers(flight)
        while flight.next_is_full and len(self._jobs) + len(flight.works) - flight.n_agreed < MAX_FLYING:
            self._launch(flight)
            if may_speak:
                self._send_headers(flight)
            moved = True
        return moved

    @property
    def _may_scan_early(self) -> bool:
        """Whether exponents may be found before it is known that all are there: nothing is lost if some are not."""
        return not self.options.error_feedback and self._chooser is None

    def _launch(self, flight: Flight) -> None:
        """Find the exponents of the next bucket."""
        assert self.transport is not None
        index = len(flight.works)
        bucket, layers = flight.plan.buckets[index], flight.layers_of(index)
        phase = timeline.phases(self.step_number, index, len(layers))
        lease, reduction = Lease(self._pool), flight.plan.reductions[index]
        self.kernels.begin()
        work = Work(
            self.kernels, self.transport, self.options, bucket, layers, lease, phase, self.step_number, self._residuals
        )
        if reduction.needs_exponents and self.options.error_feedback:
            work.owned += self._residuals.fold(layers, work.table, bucket.layer_of_segment)
        if self._chooser is not None:
            shown, shapes = [layer.shown for layer in layers], [tuple(layer.shape) for layer in layers]
            self._chooser.observe(self.kernels, shown, work.table, bucket.layer_of_segment, shapes)
        if reduction.needs_exponents:
            phase("APS_SCAN")
            work.scanned = self.kernels.scan(work.table, stochastic=bucket.is_stochastic)
        else:
            work.scanned = reduction.prepare(work)
        flight.works.append(work)

    def _send_headers(self, flight: Flight) -> bool:
        """Send the headers of the buckets whose exponents are known, in order; True if there was one."""
        assert self.transport is not None
        moved = False
        while flight.is_scanning and flight.works[flight.n_said].scanned.done():
            index, work = flight.n_said, flight.works[flight.n_said]
            exponents = _NONE
            if flight.plan.reductions[index].needs_exponents:
                exponents = work.bucket.largest_by_layer(work.table["exponent"], EXP_ZERO)
            factors = factors_digest(work.factors)
            header = Header(flight.plan.digest, factors, index, exponents).encode()
            work.phase("APS_EXPONENTS", len(header) * (self.transport.size - 1))
            flight.n_said += 1
            self._say(HEADER, header)
            moved = True
        return moved

    def _agree(self, shared: np.ndarray) -> None:
        """All ranks have sent the header of the next bucket: it goes on its way."""
        flight = self._flight
        assert flight is not None and self.transport is not None
        work, reduction = flight.works[flight.n_agreed], flight.plan.reductions[flight.n_agreed]
        work.specs = flight.plan.specs_of[flight.n_agreed]
        if reduction.needs_exponents:
            work.scale(shared, self.transport.size)
        work.tag = N_TAGS * self._serial
        self._serial = (self._serial + 1) % MAX_SERIAL
        if len(work.layers) == len(self._pending):
            self._pending.clear()
        else:
            for layer in work.layers:
                del self._pending[layer.name]
        self._count_bytes(reduction, len(work.layers), flight.plan.n_elements_of[flight.n_agreed])
        flight.n_agreed += 1
        self._jobs.append(Job(work, reduction.run(work)))
        if flight.is_agreed:
            self._flight = None
            self._end_batch()

    def _end_batch(self) -> None:
        """A whole flight has been agreed on, on all ranks at the same place of their conversation."""
        self.step_number += 1
        self._pool.end_batch()
        if self._chooser is not None and self.step_number >= self.options.auto_steps:
            self._choose()

    def _count_bytes(self, reduction: Reduction, n_layers: int, n_elements: int) -> None:
        """Count what leaves this rank, or its host where ranks of a host take turns to send for all of them."""
        assert self.transport is not None
        size, n_near = self.transport.size, reduction.n_near
        n_words = 11 + (n_layers if reduction.needs_exponents else 0)
        header = 4 * n_words * (size - n_near)
        self.statistics.add_bytes(reduction.bytes_sent() + header, 2 * (size - 1) / size * 4 * n_elements / n_near)

    def _end_jobs(self) -> None:
        """Hand over the results of buckets that have come home."""
        finished = [job for job in self._jobs if job.finished]
        if not finished:
            return
        self._jobs = [job for job in self._jobs if not job.finished]
        for job in finished:
            work = job.work
            work.phase.end()
            work.lease.end()
            self.statistics.add_layers(
                work.specs, work.layer_exponents, work.measured_layers, work.measured, work.histograms
            )
            for layer in work.layers:
                layer.done = True


def _twice(layer: Layer) -> ValueError:
    layer.error = ValueError(
        f"APSCompressor: {layer.name!r} was submitted twice before its result was used; "
        f"give tensors of different models different names"
    )
    return layer.error


_abandoned: list[Any] = []


def local_allreduce(
    per_rank: Sequence[Sequence[Layer]], options: Options, kernels: Any, exchanges: Sequence[Exchange] | None = None
) -> list[Exchange]:
    """Reduce `per_rank[r]`, the layers of emulated rank r, in one process, through the real exchange.

    Pass the returned exchanges in again to keep residuals and the step number over several calls.
    """
    from horovod_aps.transports.local import LocalTransport

    if exchanges is None:
        exchanges = [Exchange(kernels, transport, options) for transport in LocalTransport.world(len(per_rank))]
    for exchange, layers in zip(exchanges, per_rank):
        exchange.self_driven = True  # they share kernels, which only one thread at a time may use
        for layer in layers:
            layer.done = layer.folded = False
            exchange.submit(layer)
    running = [exchange.steps() for exchange in exchanges]
    while running:
        running = [steps for steps in running if next(steps, None) is not None]
    for exchange in exchanges:
        exchange.kernels.end()
    return list(exchanges)
