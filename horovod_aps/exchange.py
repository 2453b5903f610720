"""The APS exchange: what happens between a gradient handed in and the same gradient reduced over all ranks.

    exponents -> encode -> (all-to-all -> reduce ->) all-gather -> decode

Frontends `submit` layers as their gradients become ready and `flush` before they need the results. A batch is
what was submitted between two flushes. Ranks may submit in any order; they agree on the make-up of a batch the
first time they see it (`agreement`), and from then on every exponent message carries a digest of it, so that a
rank that differs is noticed before any byte is misread.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from horovod_aps import agreement, timeline
from horovod_aps.auto import AutoChooser, format_table
from horovod_aps.flight import POLL_SECONDS, Buffers, Flight, Job, Layer, Plan, Steps
from horovod_aps.kernels import EXP_NONFINITE, EXP_ZERO, SUM_FLOAT, SUM_FORMAT, SUM_KAHAN
from horovod_aps.layout import EXPONENT_BYTES, MAX_LAYERS, BucketLayout, LayerSpec, part_of
from horovod_aps.log import logger, trace
from horovod_aps.options import Options
from horovod_aps.statistics import Statistics, exponent_histograms
from horovod_aps.transport import LocalTransport, PendingTransport, Transport

ACCUMULATE_CODES = {"float32": SUM_FLOAT, "format": SUM_FORMAT, "kahan": SUM_KAHAN}
MAX_PLANS = 64  # batches remembered; an older one is agreed on anew when it comes back
LOOK_SECONDS = 500e-6  # between looks from within backward
HEADER_WORDS = 6  # digest, its negation, a flag, and the number of buckets, ahead of the exponents of a bucket
N_BUCKETS_WORD = 5  # where the number of buckets is
_abandoned: list[Flight] = []


class Exchange:
    """APS all-reduce of batches of layers among the ranks of one process set."""

    def __init__(self, kernels: Any, transport: Transport | PendingTransport, options: Options) -> None:
        self.options = options
        self._is_auto = options.overrides == "auto"
        self._chooser = AutoChooser(options) if self._is_auto else None
        self.kernels = kernels
        self.transport: Any = transport
        self.statistics = Statistics()
        self.residuals: dict[str, np.ndarray] = {}
        self.step_number = 0
        self._pending: OrderedDict[str, Layer] = OrderedDict()
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self._plan_of: dict[str, Plan] = {}
        self._flight: Flight | None = None
        self._lock = threading.RLock()
        self.gate: Callable[[], bool] | None = None
        """If set, nothing starts from `submit` until it returns True; for a frontend that first asks who is there."""
        self.after_two_steps: weakref.WeakMethod[Callable[[], None]] | None = None
        """What to call when the second step is over, if its owner is still there."""

    # ---- handing in and taking out ------------------------------------------------------------------------

    def submit(self, layer: Layer) -> None:
        """Hand in one gradient; with an overlapping transport full buckets start on their way at once."""
        with self._lock:
            if layer.name in self._pending:
                raise ValueError(f"APSCompressor: {layer.name!r} was submitted twice before its result was used; "
                                 f"give tensors of different models different names")
            self._pending[layer.name] = layer
            flight = self._flight
            if flight is None:
                if len(self._pending) > 1 or not self.transport.overlaps:
                    return
                plan = self._plan_with(layer.name)
                if plan is None:
                    return
                flight = self._flight = Flight(plan)
            is_full = flight.arrive(layer)
            if self._gate_is_open():
                self._look_after(flight, is_full)

    def _gate_is_open(self) -> bool:
        if self.gate is not None and self.gate():
            self.gate = None
        return self.gate is None

    def flush(self) -> None:
        """Reduce everything that was submitted; on return all targets hold their results."""
        with self._lock:
            if isinstance(self.transport, PendingTransport):
                self.transport = self.transport.connect()
            waits = 0
            for moved in self.flush_steps():
                # Yield the core at first, in case the answer is near; then sleep, so that the kernels of the
                # other ranks and Horovod's own thread get the cores.
                waits = 0 if moved else waits + 1
                time.sleep(0 if waits < 20 else POLL_SECONDS)

    def flush_steps(self) -> Generator[bool, None, None]:
        """`flush` in steps that never block, for a caller that drives several exchanges at once."""
        batch, self._pending = self._pending, OrderedDict()
        flight, self._flight = self._flight, None
        try:
            done: set[str] = set()
            if flight is None and batch:
                flight = self._board(batch)
            if flight is not None:
                yield from self._fly(flight)
                done = flight.agreed_names()
            rest = [layer for name, layer in batch.items() if name not in done]
            if rest:
                yield from self._answer_the_rest(flight)
                yield from self._reduce_unplanned(batch, rest)
            if self._chooser is not None and self.step_number + 1 >= self.options.auto_steps and batch:
                yield from self._choose_formats()
        except BaseException:
            _abandon(flight)
            raise
        finally:
            self.step_number += 1
        if self.step_number == 2 and self.after_two_steps is not None and (call := self.after_two_steps()):
            call()

    def names(self) -> set[str]:
        """What people call the layers of the batches that are remembered."""
        return {spec.shown for plan in self._plans.values() for spec in plan.specs}

    def _choose_formats(self) -> Generator[bool, None, None]:
        """End of the measuring steps of overrides="auto": settle every layer's format with all ranks."""
        assert self._chooser is not None
        request = self.transport.gather_bytes(self._chooser.proposal(self.transport.size), 0)
        while not request.done():
            yield False
        overrides = self._chooser.settle(request.result())
        self.options = self.options.replace(overrides=overrides)
        self._chooser = None
        if self.transport.rank == 0:
            logger.warning("formats chosen by overrides=\"auto\":\n%s", format_table(overrides))

    @property
    def chosen(self) -> dict[str, Any] | None:
        """The formats that overrides="auto" has chosen; None while it measures, and without it."""
        return dict(self.options.overrides) if self._is_auto and self._chooser is None else None  # type: ignore

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change options between steps, in the same way on all ranks; overrides by hand put an end to "auto"."""
        self.options = self.options.replace(**changes)
        if "overrides" in changes:
            self._is_auto, self._chooser = False, None

    def state(self) -> dict[str, Any]:
        """Residuals and schedule position, as plain arrays and numbers."""
        residuals = {name: np.array(self.kernels.to_host(kept)) for name, kept in self.residuals.items()}
        measured = None if self._chooser is None else self._chooser.state()
        return {"step_number": self.step_number, "residuals": residuals, "overrides": self.chosen, "auto": measured}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state()`; formats that "auto" had chosen are for "auto" only, the user's own come first."""
        self.step_number = state["step_number"]
        self.residuals = {}
        for name, values in state["residuals"].items():
            self.residuals[name] = self.kernels.from_host(values)
        if self._is_auto and state["overrides"] is not None:
            self.options = self.options.replace(overrides=state["overrides"])
            self._chooser = None
        elif self._chooser is not None and state.get("auto"):
            self._chooser.load_state(state["auto"])

    def inherit(self, other: Exchange) -> None:
        """Take over what a rank keeps when the world around it changes."""
        self.load_state(other.state())
        self.statistics = other.statistics

    def forget(self) -> None:
        """Drop everything that was learned from the present ranks, for a changed world."""
        with self._lock:
            self._pending.clear()
            self._plans.clear()
            self._plan_of.clear()
            _abandon(self._flight)
            self._flight = None

    def _board(self, batch: Mapping[str, Layer]) -> Flight | None:
        """The flight of a whole batch, if its make-up is known; most are as the one before."""
        plan = self._plan_with(next(iter(batch)))
        if plan is not None and len(plan.specs) == len(batch):
            flight = Flight.of(plan, batch.values())
            if not any(flight.missing):
                return flight
        plan = self._plans.get(agreement.describe(self._specs(batch.values()), self.options))
        if plan is None:
            return None
        plan.options, plan.warm = self.options, self._is_warm()
        self._plan_of.update((spec.name, plan) for spec in plan.specs)
        return Flight.of(plan, batch.values())

    # ---- agreeing on a batch ------------------------------------------------------------------------------

    def _specs(self, layers: Any) -> list[LayerSpec]:
        warm = self._is_warm()
        return [agreement.spec_of(layer, self.options, warm) for layer in layers]

    def _is_warm(self) -> bool:
        return self.step_number < self.options.warmup_steps or self._chooser is not None

    def _answer_the_rest(self, flight: Flight | None) -> Generator[bool, None, None]:
        """Tell ranks that know this batch, in the headers that they expect, that we must talk.

        With an overlapping transport every batch has as many headers as the rank with the most buckets wants to
        send, which the first one says; otherwise one that says that we must talk is the last.
        """
        if flight is None or flight.n_agreed == len(flight.plan.buckets):  # others may be at their next batch
            n_sent, n_headers = 0, 1
        elif self.transport.overlaps:
            n_sent, n_headers = flight.n_launched, flight.n_headers
        else:
            n_sent, n_headers = 0, int(not flight.broken)
        while n_sent < n_headers:
            request = self.transport.max(self._header(None, []), 0)
            while not request.done():
                yield False
            n_sent, n_wanted = n_sent + 1, int(request.result()[N_BUCKETS_WORD])
            if self.transport.overlaps:
                n_headers = max(n_headers, n_wanted)

    def _reduce_unplanned(self, batch: dict[str, Layer], rest: list[Layer]) -> Generator[bool, None, None]:
        """Agree with all ranks on the batch, remember it, and reduce the layers that are left of it."""
        proposals = yield from self._propose(batch)
        ahead = agreement.most_advanced(proposals)
        if ahead is not None:  # the same on all ranks, so all of them propose again
            self._catch_up(*ahead)
            proposals = yield from self._propose(batch)
        order = agreement.settle(proposals)
        ranked = sorted(rest, key=lambda layer: order[layer.name])
        plan = self._remember(self._specs(ranked))
        flight = Flight.of(plan, ranked)
        yield from self._fly(flight)
        if flight.agreed_names() != {layer.name for layer in ranked}:
            raise RuntimeError("APSCompressor: ranks agreed on a batch, then sent different ones; please report this")

    def _propose(self, batch: dict[str, Layer]) -> Generator[bool, None, list[bytes]]:
        """Everyone's description of the batch."""
        specs = self._specs(batch.values())
        trace("negotiating a batch of %d layers", len(specs))
        proposal = agreement.proposal(specs, self.options, self.step_number, self.chosen)
        request = self.transport.gather_bytes(proposal, 0)
        while not request.done():
            yield False
        return request.result()

    def _catch_up(self, step_number: int, chosen: dict[str, Any] | None) -> None:
        """Go on where the most advanced rank is: this rank may have joined an elastic job just now."""
        trace("going on at step %d instead of %d", step_number, self.step_number)
        self.step_number = step_number
        if self._is_auto and chosen is not None:
            overrides = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
            self.options = self.options.replace(overrides=overrides)
            self._chooser = None

    def _remember(self, specs: list[LayerSpec]) -> Plan:
        description = agreement.describe(specs, self.options)
        plan = self._plans[description] = Plan(specs, description, self.transport.size, self.options, self._is_warm())
        if len(self._plans) > MAX_PLANS:
            _, oldest = self._plans.popitem(last=False)
            self._plan_of = {name: plan for name, plan in self._plan_of.items() if plan is not oldest}
        self._plan_of.update((spec.name, plan) for spec in specs)
        return plan

    def _header(self, plan: Plan | None, exponents: Any) -> np.ndarray:
        """The fixed-size int32 message that opens a bucket: who we think we are, and our exponents."""
        header = np.full(HEADER_WORDS + MAX_LAYERS, EXP_ZERO, np.int32)
        words = (0, 0) if plan is None else plan.words
        n_buckets = 0 if plan is None else len(plan.buckets)
        header[:HEADER_WORDS] = (words[0], words[1], -words[0], -words[1], plan is None, n_buckets)
        header[HEADER_WORDS:HEADER_WORDS + len(exponents)] = exponents
        return header

    # ---- flying a planned batch ---------------------------------------------------------------------------

    def _plan_with(self, name: str) -> Plan | None:
        """The plan of the batch that the layer was last seen in, if its formats still hold."""
        plan = self._plan_of.get(name)
        if plan is None or plan.options is not self.options or plan.warm != self._is_warm():
            return None
        return plan

    def _advance(self, flight: Flight) -> bool:
        """Launch the buckets that may start and move all jobs on; True if anything moved.

        A rank that disagrees must not leave messages behind that nobody will ever answer. If all buckets start at the
        flush, they start after the first has been agreed on, whose digest speaks for the whole batch then. If they
        start in backward, a rank may find out later that a gradient is missing; it then answers the others' headers
        with empty ones (`_answer_the_rest`).
        """
        moved = False
        while self._may_launch(flight):
            self._launch(flight)
            moved = True
        for job in flight.jobs:
            moved |= job.step()
        if moved:
            flight.jobs = [job for job in flight.jobs if not job.finished]
        return moved

    def _may_launch(self, flight: Flight) -> bool:
        index = flight.n_launched
        return (not flight.broken and index < len(flight.plan.buckets) and flight.missing[index] == 0
                and (self.transport.overlaps or flight.n_agreed >= min(1, index)))

    def _launch(self, flight: Flight) -> None:
        flight.jobs.append(Job(self._reduce_bucket(flight, flight.n_launched)))
        flight.n_launched += 1

    def _look_after(self, flight: Flight, is_full: bool) -> None:
        """Move the flight on from within backward, but not so often that looking costs more than it brings."""
        if is_full or time.perf_counter() >= flight.next_look:
            self._advance(flight)
            flight.next_look = time.perf_counter() + LOOK_SECONDS

    def _fly(self, flight: Flight) -> Generator[bool, None, None]:
        """Bring every bucket that can be launched home."""
        while True:
            moved = self._advance(flight)
            if not flight.jobs and not moved:
                return
            yield moved

    def _reduce_bucket(self, flight: Flight, index: int) -> Steps:
        """All phases of one bucket; yields what it waits for."""
        plan, bucket, transport = flight.plan, flight.plan.buckets[index], self.transport
        buffers = plan.buffers[index]
        if buffers is None:
            buffers = plan.buffers[index] = Buffers(self.kernels, bucket, transport.rank, transport.size)
        layers = [flight.layers[plan.specs[i].name] for i in bucket.layers]
        table, segment_layer = buffers.table, bucket.layer_of_segment
        targets = np.array([layer.target for layer in layers], np.uint64)
        self._point_at_sources(buffers, bucket, layers)
        if self._chooser is not None:
            self._chooser.observe(self.kernels, [layer.shown for layer in layers], table, segment_layer)
        phase = timeline.phases(self.step_number, index, len(layers))

        # Exponents: the largest of each layer, over its segments and over the ranks.
        phase("APS_SCAN")
        self.kernels.scan(table, stochastic=self.options.rounding == "stochastic")
        exponents = np.full(len(layers), EXP_ZERO, np.int32)
        np.maximum.at(exponents, segment_layer, table["exponent"])
        phase("APS_EXPONENTS", 4 * (HEADER_WORDS + MAX_LAYERS))
        request = transport.max(self._header(plan, exponents), index)
        yield request
        shared = request.result()
        phase.end()
        words = shared[:HEADER_WORDS]
        flight.n_headers = max(flight.n_headers, int(words[N_BUCKETS_WORD]))
        if words[0] != -words[2] or words[1] != -words[3] or words[4]:
            flight.broken = True
            for layer in layers:  # their gradients are in the residuals already, and will be handed in again
                self.residuals.pop(layer.name, None)
            return
        flight.n_agreed += 1
        exponents = self._final_exponents(shared[HEADER_WORDS:HEADER_WORDS + len(layers)], plan, bucket)
        table["exponent"] = exponents[segment_layer]

        mode = ACCUMULATE_CODES[self.options.accumulate]
        if bucket.n_shards == 1:
            # Two ranks swap everything, part by part: one is on its way while the next is encoded.
            requests = []
            for k, (rows, span) in enumerate(buffers.parts):
                phase("APS_ENCODE")
                self.kernels.encode(part_of(table, rows, span.start), buffers.send[span], self._seed(transport.rank))
                phase("APS_ALLGATHER", span.stop - span.start)
                slot = index + k * len(plan.buckets)
                requests.append(transport.allgather(buffers.send[span], [span.stop - span.start] * transport.size,
                                                    buffers.recv[span], slot))
            self._keep_losses(plan, bucket, buffers, exponents)
            self._point_at_targets(buffers, bucket, plan, targets)
            for (rows, span), request in zip(buffers.parts, requests):
                yield request
                phase("APS_DECODE")
                self.kernels.decode(part_of(table, rows, span.start), request.result(), mode)
            phase.end()
            return

        phase("APS_ENCODE")
        self.kernels.encode(table, buffers.send, self._seed(transport.rank))
        self._keep_losses(plan, bucket, buffers, exponents)

        # Scatter, reduce my shard, gather everyone's.
        phase("APS_ALLTOALL", len(buffers.send) - buffers.n_payload)
        request = transport.alltoall(buffers.send, bucket.shard_bytes, buffers.recv, index)
        yield request
        phase("APS_REDUCE")
        first, last = bucket.shard_segments[transport.rank], bucket.shard_segments[transport.rank + 1]
        buffers.mine["exponent"] = table["exponent"][first:last]
        inputs, sums = request.result(), buffers.sums[:buffers.n_payload]
        if self.options.error_feedback:
            lost = self._exact_sums(buffers, inputs, mode)
        self.kernels.reduce(buffers.mine, inputs, mode, sums, self._seed(transport.size),
                            keep_exponent=not self.options.scaling)
        if self.options.error_feedback:  # what rounding the sum loses comes back through the owner's gradient
            lost["exponent"] = buffers.mine["exponent"]
            self.kernels.residual(lost, sums)
            self.kernels.add(lost, table["data"][first:last])
        buffers.sums[buffers.n_payload:] = buffers.mine["exponent"].astype("<i2").view(np.uint8)
        phase("APS_ALLGATHER", len(buffers.sums) * (transport.size - 1))
        request = transport.allgather(buffers.sums, np.diff(bucket.gather_bytes).tolist(), buffers.gathered, index)
        yield request
        phase("APS_DECODE")
        self._point_at_targets(buffers, bucket, plan, targets)
        for shard, message in enumerate(request.result()):
            first, last = bucket.shard_segments[shard], bucket.shard_segments[shard + 1]
            n_exponents = EXPONENT_BYTES * int(last - first)
            part = part_of(table, slice(first, last), bucket.shard_bytes[shard])
            part["exponent"] = message[len(message) - n_exponents:].view("<i2")
            self.kernels.decode(part, [message[:len(message) - n_exponents]], 0)
        phase.end()

    def _keep_losses(self, plan: Plan, bucket: BucketLayout, buffers: Buffers, exponents: np.ndarray) -> None:
        """Count what was encoded, and keep what rounding has lost for the next step."""
        self._account(plan, bucket, buffers, exponents)
        if self.options.error_feedback:
            self.kernels.residual(buffers.table, buffers.send)

    def _final_exponents(self, shared: np.ndarray, plan: Plan, bucket: BucketLayout) -> np.ndarray:
        """The exponents to encode with: as shared, or as the paper's low-precision sums need them."""
        exponents = shared.copy()
        ordinary = (exponents != EXP_ZERO) & (exponents != EXP_NONFINITE)
        if self.options.accumulate != "float32":  # partial sums of N values must not overflow
            exponents[ordinary] += int(np.ceil(np.log2(self.transport.size)))
        if not self.options.scaling:  # a fixed scale of 1: every format's own top exponent
            tops = np.array([agreement.top_exponent(plan.specs[i].format) for i in bucket.layers], np.int32)
            exponents[ordinary] = tops[ordinary]
        return exponents

    def _point_at_sources(self, buffers: Buffers, bucket: BucketLayout, layers: list[Layer]) -> None:
        """Aim the segment table at the values to encode: the gradients, or gradient plus residual."""
        table, segment_layer = buffers.table, bucket.layer_of_segment
        sources = np.array([layer.source for layer in layers], np.uint64)
        table["data"] = sources[segment_layer] + buffers.item_offsets.astype(np.uint64)
        if not self.options.error_feedback:
            return
        residuals = np.empty(len(layers), np.uint64)
        for i, layer in enumerate(layers):
            n_elements = math.prod(layer.shape)
            kept = self.residuals.get(layer.name)
            if kept is None or kept.size != n_elements:
                kept = self.residuals[layer.name] = self.kernels.zeros(n_elements)
            residuals[i] = self.kernels.address(kept)
        addresses = residuals[segment_layer] + buffers.residual_offsets.astype(np.uint64)
        self.kernels.add(table, addresses)
        table["data"], table["dtype"] = addresses, 0

    def _exact_sums(self, buffers: Buffers, inputs: Any, mode: int) -> np.ndarray:
        """The sums of my shard before they are rounded, as a table of segments that points at them."""
        lost = buffers.mine.copy()
        if buffers.scratch is None:
            buffers.scratch = self.kernels.zeros(int(lost["n"].sum()))
        starts = 4 * (np.cumsum(lost["n"]) - lost["n"])
        lost["data"] = self.kernels.address(buffers.scratch) + starts.astype(np.uint64)
        lost["dtype"], lost["factor"] = 0, 1
        self.kernels.decode(lost, inputs, mode)
        return lost

    def _point_at_targets(self, buffers: Buffers, bucket: BucketLayout, plan: Plan, targets: np.ndarray) -> None:
        """Aim the segment table at where the results go."""
        table = buffers.table
        table["data"] = targets[bucket.layer_of_segment] + buffers.item_offsets.astype(np.uint64)
        table["dtype"] = bucket.segments["dtype"]

    def _seed(self, stream: int) -> int | None:
        """Seed of stochastic rounding: another one for every step and rank, the same in every run."""
        if self.options.rounding == "nearest":
            return None
        return (self.options.seed << 40) ^ (self.step_number << 16) ^ stream

    def _account(self, plan: Plan, bucket: BucketLayout, buffers: Buffers, exponents: np.ndarray) -> None:
        size = self.transport.size
        n_elements = sum(plan.specs[i].n_elements for i in bucket.layers)
        sent = len(buffers.send) * (size - 1) / (1 if bucket.n_shards == 1 else size)
        if bucket.n_shards > 1:
            sent += len(buffers.sums) * (size - 1)
        self.statistics.add_bytes(sent + 4 * (HEADER_WORDS + MAX_LAYERS), 2 * (size - 1) / size * 4 * n_elements)
        measured = histograms = None
        if self.options.stats:
            measured = self.kernels.measure(buffers.table, buffers.send)
            if self.options.scaling:
                histograms = exponent_histograms(self.kernels, buffers.table, bucket.layer_of_segment,
                                                 len(bucket.layers), self.step_number)
        self.statistics.add_layers([plan.specs[i] for i in bucket.layers], exponents, bucket.layer_of_segment,
                                   measured, histograms)


def _abandon(flight: Flight | None) -> None:
    """Keep the buffers of a flight that never came home: the network may still write into them."""
    if flight is not None and flight.jobs:
        _abandoned.append(flight)


def local_allreduce(per_rank: Sequence[Sequence[Layer]], options: Options, kernels: Any,
                    exchanges: Sequence[Exchange] | None = None) -> list[Exchange]:
    """Reduce `per_rank[r]`, the layers of emulated rank r, in one process, through the real exchange.

    Pass the returned exchanges in again to keep residuals and the step number over several calls.
    """
    if exchanges is None:
        exchanges = [Exchange(kernels, transport, options) for transport in LocalTransport.world(len(per_rank))]
    for exchange, layers in zip(exchanges, per_rank):
        for layer in layers:
            exchange.submit(layer)
    running = [exchange.flush_steps() for exchange in exchanges]
    while running:
        running = [steps for steps in running if next(steps, None) is not None]
    return list(exchanges)
