"""What all examples share and no framework is needed for: flags, messages, data folders, learning rates."""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

from horovod_aps import config
from horovod_aps.options import Options

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp")  # what both frameworks read
backend = "horovod"  # or "ddp", once flags are parsed
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours


def launcher_rank() -> int:
    """This process's rank as its launcher set it, known before `hvd.init()`; 0 if nobody launched us."""
    return int(config.launcher_rank() or 0)


class Parser(argparse.ArgumentParser):
    """argparse with defaults in --help, and one message for a wrong flag instead of one from every rank."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        refuse(f"{message}\nTry {self.prog} --help")


def refuse(message: str) -> NoReturn:
    """Stop because of what all ranks see alike, such as a wrong flag, with one message and before any of them waits."""
    if launcher_rank() == 0:
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    else:
        time.sleep(10)  # a launcher ends all ranks with the first that leaves: that is to be rank 0
    sys.exit(2)


@contextlib.contextmanager
def needs_torchvision() -> Iterator[None]:
    """For its import: a build that does not belong to the torch that is there cannot be loaded."""
    try:
        yield
    except (ImportError, RuntimeError, OSError) as error:
        refuse(
            f"torchvision cannot be imported ({error}); install the build that belongs to your torch, from where that "
            f"came from. pytorch_digits.py does without it."
        )


def fail(message: str) -> NoReturn:
    """Stop with one line that says which rank on which host is in trouble."""
    sys.exit(f"{Path(sys.argv[0]).name}, rank {launcher_rank()} on {socket.gethostname()}: {message}")


@contextlib.contextmanager
def checks(hvd: Any) -> Iterator[None]:
    """For code that may `fail` on some ranks: then all of them stop, and rank 0 prints one of the messages."""
    problem = None
    try:
        yield
    except SystemExit as stop:
        problem = stop.code
    # The name must not depend on the object's type, as Horovod's default does.
    problems = [text for text in hvd.allgather_object(problem, name="checks") if text is not None]
    if not problems:
        return
    if hvd.rank() == 0:
        print(problems[0], file=sys.stderr, flush=True)
    hvd.allgather_object(None, name="checks.end")  # nobody leaves before rank 0 has spoken
    logging.getLogger("horovod_aps").setLevel(logging.ERROR)  # that nothing was trained then is no news
    sys.exit(1)


# ---- Flags ----


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of a flag whose value has limits."""

    def convert(text: str) -> int:
        if not text.removeprefix("-").isdecimal():
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}")
        if int(text) < low or (high is not None and int(text) > high):
            limits = f"at least {low}" if high is None else f"in {low}..{high}"
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text}")
        return int(text)

    return convert


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
        help='hybrid precision: "*fc*=float32" or "*bn*=5,10" for layers whose name matches, or '
        '"auto" to choose from the first steps; may be repeated, the first match wins',
    )
    group.add_argument(
        "--aps-error-feedback",
        action="store_true",
        help="add what rounding lost to the next step's gradient; for formats of 4 bits",
    )
    group.add_argument("--aps-report", metavar="FILE", help="write an HTML page on what was sent, layer by layer")


def add_backend_flag(parser: argparse.ArgumentParser) -> None:
    """--backend, for examples that also do without Horovod."""
    parser.add_argument(
        "--backend",
        choices=("horovod", "ddp"),
        default="horovod",
        help="who averages gradients: Horovod, or PyTorch's DistributedDataParallel, started by torchrun",
    )


def add_training_flags(
    parser: argparse.ArgumentParser, *, epochs: int, batch_size: int, base_lr: float, warmup_epochs: float
) -> None:
    """Flags of every example that trains."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=integer(1), default=epochs, help="passes over the data")
    group.add_argument("--batch-size", type=integer(1), default=batch_size, help="samples per rank and step")
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
    group.add_argument(
        "--max-steps",
        type=integer(1),
        metavar="N",
        help="stop after N steps, to try things out; large validation data are sampled then, N batches per rank",
    )
    group.add_argument("--synthetic", action="store_true", help="train on made-up data; no data folder is needed")
    group.add_argument("--seed", type=integer(0, 2**32 - 1), default=42, help="of initialisation and shuffling")
    group.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    group = parser.add_argument_group("files, written by rank 0")
    group.add_argument("--checkpoint", type=Path, metavar="FILE", help="saved after every epoch, and at the end")
    group.add_argument(
        "--resume", action="store_true", help="go on from --checkpoint, if it exists, as if never interrupted"
    )
    group.add_argument("--log-dir", metavar="DIR", help="write TensorBoard logs there")


def add_benchmark_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the benchmarks on random data."""
    parser.add_argument("--batch-size", type=integer(1), default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=integer(32), default=224, help="side of the images")
    parser.add_argument("--num-warmup-batches", type=integer(0), default=10, help="steps before the timing begins")
    parser.add_argument("--num-batches-per-iter", type=integer(1), default=10, help="steps of one measurement")
    parser.add_argument("--num-iters", type=integer(1), default=10, help="measurements")
    parser.add_argument("--mixed-precision", action="store_true", help="float16 on GPUs, bfloat16 on CPUs")
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=42)
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse and check the flags; a wrong one ends the program before any rank waits for another."""
    args = parser.parse_args()
    global backend
    backend = getattr(args, "backend", backend)
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


def compression_name(args: argparse.Namespace, compression: Any) -> str:
    """How the gradients are sent, for people."""
    return str(compression) if args.aps_allreduce else "fp16" if args.fp16_allreduce else "none"


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
        compressor.report(args.aps_report, title=Path(sys.argv[0]).name)
        print(f"Report: {args.aps_report}", flush=True)


# ---- Progress ----


def progress(total: int, rank: int, desc: str | None = None, done: int = 0) -> Any:
    """A bar on rank 0's terminal; where there is none, as in a log or under a launcher, a line every half minute."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(total=total, initial=done, desc=desc, disable=rank != 0)
    seconds = 30
    return tqdm(
        total=total,
        initial=done,
        desc=desc,
        disable=rank != 0,
        file=_Lines(sys.stderr),
        delay=seconds,
        mininterval=seconds,
        maxinterval=seconds,
        miniters=1,
        ncols=80,
    )


class _Lines:
    """A stream for tqdm that gets lines instead of a line that is written over again and again."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        if text.strip():
            self.stream.write(f"{text.strip()}\n")

    def flush(self) -> None:
        self.stream.flush()


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


def check_batches(n_batches: int, n_images: int, batch_size: int, size: int) -> None:
    """Stop if there is nothing to train on."""
    if n_batches == 0:
        fail(f"{n_images} images make no batch of {batch_size} on each of {size} ranks; use a smaller --batch-size")


def validation_sample(n_images: int, n_wanted: int | None, seed: int) -> list[int]:
    """All images to validate on, or as many as wanted, picked at random: files lie sorted by class.

    The same in every run with this seed, and on all ranks, which share it among them.
    """
    if n_wanted is None or n_wanted >= n_images:
        return list(range(n_images))
    return random.Random(seed).sample(range(n_images), n_wanted)


def judged_on(n_images: int, n_all: int, made_up: bool) -> str:
    """What a score says something about, for people."""
    if made_up:
        return f"on {n_images:,} images of noise with random labels: not meaningful"
    return f"on all {n_all:,} images" if n_images == n_all else f"on {n_images:,} images picked from {n_all:,}"


# ---- Checkpoints ----


def check_checkpoint(path: Path | None) -> None:
    """Stop now rather than after the first epoch if --checkpoint cannot be written; makes its folder."""
    if path is None:
        return
    if path.is_dir():
        fail(f"--checkpoint {path} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--checkpoint {path}: its folder cannot be made ({error.strerror})")


def resume(args: argparse.Namespace, exists: bool, load: Callable[[], int]) -> int:
    """For rank 0: `load` the checkpoint if it is asked for and there; returns the steps already done."""
    if not args.resume:
        return 0
    if not exists:
        print(f"--resume: there is no {args.checkpoint} yet, starting from random weights", flush=True)
        return 0
    try:
        step = load()
    except Exception as error:  # whatever a file of something else leads to
        reason = str(error).strip().partition("\n")[0]
        fail(f"--resume: {args.checkpoint} is no checkpoint of this model ({type(error).__name__}: {reason})")
    print(f"Resuming from {args.checkpoint} at step {step}", flush=True)
    return step


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
