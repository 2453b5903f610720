"""Dettmers' predictor (arXiv 1511.04561): data parallel convolutions, model parallel fully-connected layers.

Activations, not gradients, pass between the ranks that share the fully-connected layers, one sub-batch after the other,
and the next is computed while one is on its way. All times are of one step, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

# The closed form for 96 GPUs: what of a transfer stays behind the computation, and how often the rest is waited for.
# With these all 24 published entries are within 0.1; with 1.3 ms and 31 times two of them are off by 0.14.
HIDDEN_MS, OVERHANG = 1.28, 30.85

SUB_BATCHES = (128, 256, 512, 1024, 2048, 12288)
FULLY_CONNECTED_MS = (624.0, 312.0, 156.0, 78.0, 39.0, 6.5)
SEND_MS = {32: (2.1, 4.2, 7.15, 17.4, 25.5, 250.0), 8: (0.35, 0.55, 1.13, 2.25, 3.26, 31.0)}
"""His table for 96 GPUs, by sub-batch: all passes through the fully-connected layers, and sending one sub-batch."""


@dataclass(frozen=True)
class ModelParallel:
    """A network and how its fully-connected layers are shared; the defaults are Dettmers' AlexNet on four GPUs."""

    step_ms: float = 104.1
    """A step on one GPU."""
    fc_ms: float = 6.5
    """The part of it that the fully-connected layers take."""
    conv_penalty_ms: float = 0.05
    """Waiting for the gradients of the convolutions, which mostly overlap."""
    sub_batches: int = 4
    parallel_fc_ms: float = 3.34
    """The shared fully-connected layers for one sub-batch."""

    def __post_init__(self) -> None:
        for name in ("step_ms", "fc_ms", "conv_penalty_ms", "parallel_fc_ms"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"model-parallel: {name} must be finite and not negative, got {getattr(self, name)}")
        if self.fc_ms > self.step_ms:
            raise ValueError(f"model-parallel: fc_ms must be at most step_ms {self.step_ms}, got {self.fc_ms}")
        if not self.step_ms:
            raise ValueError("model-parallel: step_ms must be positive, got 0")
        if self.sub_batches < 1:
            raise ValueError(f"model-parallel: sub_batches must be at least 1, got {self.sub_batches}")

    def speedup(self, n_ranks: int, fc_penalty_ms: float) -> float:
        """G·T / ((T - fc) + conv_penalty + sub_batches·parallel_fc + fc_penalty)."""
        shared = self.sub_batches * self.parallel_fc_ms
        return n_ranks * self.step_ms / (self.step_ms - self.fc_ms + self.conv_penalty_ms + shared + fc_penalty_ms)


def many_speedup(n_ranks: int, step_ms: float, all_fc_ms: float, send_ms: float, fc_ms: float = 6.5) -> float:
    """The closed form that fits his table for 96 GPUs: G·T / ((T - fc) + F + S).

    S is what sending one sub-batch lasts if that stays behind the computation (1.28 ms), else 30.85 times the rest.
    """
    waited = send_ms if send_ms <= HIDDEN_MS else OVERHANG * (send_ms - HIDDEN_MS)
    return n_ranks * step_ms / (step_ms - fc_ms + all_fc_ms + waited)


def published(step_ms: float, n_ranks: int = 96) -> list[dict[str, Any]]:
    """His table for 96 GPUs, by sub-batch and bits, as the closed form has it."""
    return [
        {"sub_batch": size, "bits": bits, "speedup": many_speedup(n_ranks, step_ms, fc, SEND_MS[bits][i])}
        for i, (size, fc) in enumerate(zip(SUB_BATCHES, FULLY_CONNECTED_MS))
        for bits in SEND_MS
    ]


def sent_bytes(rows: int, columns: int, fmt: Any, n_ranks: int) -> float:
    """Bytes that a rank sends of one sub-batch of activations, (G-1)/G of it, in a format, scales included."""
    return fmt.bytes_for(rows * columns // n_ranks) * (n_ranks - 1)


def add_arguments(parser: argparse.ArgumentParser, count: Any, milliseconds: Any) -> None:
    """Add the options of `--scheme model-parallel`, all in milliseconds of one step."""
    group = parser.add_argument_group("--scheme model-parallel (Dettmers)")
    base = ModelParallel()
    group.add_argument("--step-ms", type=milliseconds, default=base.step_ms, help="a step on one rank (104.1)")
    group.add_argument("--fc-ms", type=milliseconds, default=base.fc_ms, help="of that, fully-connected layers (6.5)")
    group.add_argument(
        "--conv-penalty-ms",
        type=milliseconds,
        default=base.conv_penalty_ms,
        help="waiting for the convolutions' gradients (0.05)",
    )
    group.add_argument("--sub-batches", type=count, default=base.sub_batches, help="that follow each other (4)")
    group.add_argument(
        "--parallel-fc-ms",
        type=milliseconds,
        default=base.parallel_fc_ms,
        help="shared fully-connected layers for one sub-batch (3.34)",
    )
    group.add_argument(
        "--fc-penalty-ms",
        type=milliseconds,
        nargs=2,
        metavar=("AT32", "AT8"),
        help="waiting for activations at 32 and at 8 bits; default: Dettmers' 6.81 and 2.55, or, with --activations, "
        "what they take on the link",
    )
    group.add_argument(
        "--activations",
        type=count,
        nargs=2,
        metavar=("ROWS", "COLUMNS"),
        help="of one sub-batch, as they pass between ranks; each is sent forward and back",
    )


def run(args: argparse.Namespace, links: list[Any], formats: list[Any]) -> int:
    """Print the speed-ups; with nothing but defaults also his table for 96 GPUs."""
    from horovod_aps.formats import FLOAT32
    from horovod_aps.tools.perfmodel import GBIT
    from horovod_aps.tools.predict import table

    model = ModelParallel(args.step_ms, args.fc_ms, args.conv_penalty_ms, args.sub_batches, args.parallel_fc_ms)
    ranks = [4] if args.ranks == [2, 4, 8] else args.ranks
    records: list[dict[str, Any]] = []
    if args.activations is None:
        penalties = dict(zip((32, 8), args.fc_penalty_ms or (6.81, 2.55)))
        for n in ranks:
            for bits, penalty in penalties.items():
                records.append({"ranks": n, "method": f"{bits} bits", "fc_penalty_ms": penalty})
    else:
        if args.fc_penalty_ms is not None:
            raise ValueError("--fc-penalty-ms and --activations say the same thing in two ways; give one of them")
        rows, columns = args.activations
        for link in links:
            for n in ranks:
                for fmt in (FLOAT32, *formats):
                    n_bytes = sent_bytes(rows, columns, fmt, n) / max(1, n - 1)
                    once = 1e3 * link.direct(n_bytes, n)
                    # forward and back; all but the last sub-batch pass while the next is computed
                    exposed = max(0.0, once - model.parallel_fc_ms) * (model.sub_batches - 1) + once
                    records.append(
                        {
                            "ranks": n,
                            "bandwidth": link.bandwidth,
                            "method": str(fmt),
                            "bytes_sent": 2 * model.sub_batches * sent_bytes(rows, columns, fmt, n),
                            "fc_penalty_ms": 2 * exposed,
                        }
                    )
    for record in records:
        record["speedup"] = model.speedup(record["ranks"], record["fc_penalty_ms"])
    headers = ["ranks", "link Gbit/s", "activations", "waiting ms", "MB per rank", "speed-up"]
    print(f"Step {model.step_ms:g} ms, of which {model.fc_ms:g} ms in fully-connected layers, which the ranks share\n")
    print(
        table(
            headers,
            [
                [
                    one["ranks"],
                    f"{one['bandwidth'] / GBIT:g}" if "bandwidth" in one else "-",
                    one["method"],
                    f"{one['fc_penalty_ms']:.2f}",
                    f"{one['bytes_sent'] / 1e6:.1f}" if "bytes_sent" in one else "-",
                    f"{one['speedup']:.2f}x",
                ]
                for one in records
            ],
        )
    )
    if args.activations is None and args.fc_penalty_ms is None:
        rows_96 = published(model.step_ms)
        print("\n96 ranks, by sub-batch (Dettmers' transfers):\n")
        print(
            table(
                ["sub-batch", "32 bits", "8 bits"],
                [
                    [size, *(f"{one['speedup']:.1f}x" for one in rows_96 if one["sub_batch"] == size)]
                    for size in SUB_BATCHES
                ],
            )
        )
        records += [{"ranks": 96, **one} for one in rows_96]
    if args.json:
        args.json.write_text(json.dumps({"scheme": "model-parallel", "predictions": records}, indent=2) + "\n")
    return 0
