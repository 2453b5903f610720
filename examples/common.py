"""What all examples share and no framework is needed for: flags, messages, data folders, learning rates."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from horovod_aps import report
from horovod_aps.options import Options

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def launcher_rank() -> int:
    """This process's rank as its launcher set it, known before `hvd.init()`; 0 if nobody launched us."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


class Parser(argparse.ArgumentParser):
    """argparse with defaults in --help, and one message for a wrong flag instead of one from every rank."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        if launcher_rank() == 0:
            print(f"{self.prog}: {message}\nTry {self.prog} --help", file=sys.stderr)
        sys.exit(2)


def fail(message: str) -> NoReturn:
    """Stop with one line that says which rank on which host is in trouble."""
    sys.exit(f"{Path(sys.argv[0]).name}, rank {launcher_rank()} on {socket.gethostname()}: {message}")


# ---- Flags ----


def add_compression_flags(parser: argparse.ArgumentParser) -> None:
    """--fp16-allreduce as in Horovod's examples, and --aps-allreduce with its options."""
    group = parser.add_argument_group("gradient compression")
    group.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    group.add_argument(
        "--aps-allreduce",
        action="store_true",
        help="send gradients as packed custom floats, scaled layer by layer (APS)",
    )
    group.add_argument("--aps-exp-bits", type=int, default=4, metavar="E", help="exponent bits of the format")
    group.add_argument("--aps-man-bits", type=int, default=3, metavar="M", help="mantissa bits of the format")
    group.add_argument(
        "--aps-override",
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help='hybrid precision: "fc.*=float32" or "*bn*=5,10" for layers whose name matches, or '
        '"auto" to choose from the first steps; may be repeated, the first match wins',
    )
    group.add_argument(
        "--aps-error-feedback",
        action="store_true",
        help="add what rounding lost to the next step's gradient; for formats of 4 bits",
    )
    group.add_argument(
        "--aps-report", metavar="FILE", help="write an HTML page on what was sent, layer by layer"
    )


def add_training_flags(
    parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, base_lr: float, warmup_epochs: float
) -> None:
    """Flags of every example that trains."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int, default=epochs, help="passes over the data")
    group.add_argument("--batch-size", type=int, default=batch_size, help="samples per rank and step")
    group.add_argument(
        "--base-lr",
        type=float,
        default=base_lr,
        help="learning rate of a single rank; it is multiplied by the number of ranks",
    )
    group.add_argument(
        "--warmup-epochs",
        type=float,
        default=warmup_epochs,
        help="epochs over which the learning rate grows from that of one rank to that of all",
    )
    group.add_argument(
        "--mixed-precision",
        action="store_true",
        help="compute in float16 on GPUs (with loss scaling) and in bfloat16 on CPUs",
    )
    group.add_argument("--max-steps", type=int, metavar="N", help="stop after N steps, to try things out")
    group.add_argument(
        "--synthetic", action="store_true", help="train on random data; no data folder is needed"
    )
    group.add_argument("--seed", type=int, default=42, help="of initialisation and shuffling")
    group.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    group = parser.add_argument_group("files, written by rank 0")
    group.add_argument("--checkpoint", type=Path, metavar="FILE", help="saved after every epoch")
    group.add_argument("--resume", action="store_true", help="go on from --checkpoint, if it exists")
    group.add_argument("--log-dir", metavar="DIR", help="write TensorBoard logs there")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse and check the flags; a wrong one ends the program before any rank waits for another."""
    args = parser.parse_args()
    args.aps_overrides = _overrides(parser, args.aps_override)
    changed = [
        f"--{name.replace('_', '-')}"
        for name in ("aps_exp_bits", "aps_man_bits", "aps_override", "aps_error_feedback", "aps_report")
        if getattr(args, name) != parser.get_default(name)
    ]
    if changed and not args.aps_allreduce:
        parser.error(f"{changed[0]} needs --aps-allreduce")
    if args.fp16_allreduce and args.aps_allreduce:
        parser.error("--fp16-allreduce and --aps-allreduce exclude each other")
    if args.aps_allreduce:
        try:
            Options(args.aps_exp_bits, args.aps_man_bits, overrides=args.aps_overrides)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
    for name in ("epochs", "batch_size", "max_steps"):
        value = getattr(args, name, None)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if getattr(args, "resume", False) and args.checkpoint is None:
        parser.error("--resume needs --checkpoint")
    return args


def _overrides(parser: argparse.ArgumentParser, texts: list[str]) -> Mapping[str, Any] | str:
    if texts == ["auto"]:
        return "auto"
    overrides: dict[str, Any] = {}
    for text in texts:
        pattern, equals, value = text.rpartition("=")
        if value == "float32" and equals:
            overrides[pattern] = "float32"
            continue
        bits = value.split(",")
        if not equals or len(bits) != 2 or not all(part.strip().isdigit() for part in bits):
            parser.error(f'--aps-override must look like "fc.*=float32", "fc.*=5,10" or "auto", got {text!r}')
        overrides[pattern] = (int(bits[0]), int(bits[1]))
    return overrides


def compression(args: argparse.Namespace, stock: Any, compressor: Any) -> Any:
    """What the flags ask for: one of Horovod's own (`stock` is hvd.Compression) or an APSCompressor."""
    if args.aps_allreduce:
        return compressor(
            e=args.aps_exp_bits,
            m=args.aps_man_bits,
            overrides=args.aps_overrides,
            error_feedback=args.aps_error_feedback,
            stats=bool(args.aps_report),
        )
    return stock.fp16 if args.fp16_allreduce else stock.none


def finish(args: argparse.Namespace, compressor: Any, rank: int) -> None:
    """Rank 0's last words: what the gradients took on the wire, and the report if one was asked for."""
    if not args.aps_allreduce or rank != 0:
        return
    stats = compressor.stats()
    if stats["ratio"]:
        print(
            f"Gradients: {stats['bytes_sent'] / 1e6:.1f} MB sent by this rank, {stats['ratio']:.3f} of what "
            f"fp32 would have taken",
            flush=True,
        )
    if args.aps_report:
        report.write(stats, args.aps_report, Path(sys.argv[0]).name)
        print(f"Report: {args.aps_report}", flush=True)


# ---- Data folders ----


def check_image_folder(path: Path, flag: str) -> list[str]:
    """The class names of a folder with one sub-folder of images for each class, as ImageNet has on disk."""
    layout = "one sub-folder of images for each class, such as train/n01440764/n01440764_18.JPEG"
    if not path.is_dir():
        fail(f"{flag} {path} is not a folder; expected {layout}. --synthetic needs no data.")
    classes = sorted(child.name for child in path.iterdir() if child.is_dir())
    if not classes:
        fail(f"{flag} {path} has no sub-folders; expected {layout}.")
    for name in classes:
        if not any(file.suffix.lower() in IMAGE_ENDINGS for file in (path / name).iterdir()):
            fail(f"{flag} {path}: the class folder {name} holds no images ({', '.join(IMAGE_ENDINGS)}).")
    return classes


def check_same_classes(train: list[str], validation: list[str]) -> None:
    """Stop unless training and validation data have the same classes."""
    if train != validation:
        odd = sorted(set(train) ^ set(validation))
        fail(f"training and validation folders must have the same classes; these are only in one: {odd[:5]}")


# ---- Learning rate ----


def learning_rate(args: argparse.Namespace, epoch: float, size: int, decay: str) -> float:
    """The rate at a fractional epoch: linear warm-up from one rank's to `size` times it, then decay.

    decay "step" divides by 10 after 1/3, 2/3 and 8/9 of the epochs (https://arxiv.org/abs/1706.02677); "poly"
    falls to zero with power 0.9, as is usual for segmentation.
    """
    if epoch < args.warmup_epochs:
        return args.base_lr * (1 + (size - 1) * epoch / args.warmup_epochs)
    done = epoch / args.epochs
    if decay == "poly":
        return args.base_lr * size * max(1 - done, 0.0) ** 0.9
    return args.base_lr * size * 0.1 ** sum(done >= threshold for threshold in (1 / 3, 2 / 3, 8 / 9))
