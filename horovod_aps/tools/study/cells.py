"""What a study is made of: methods, networks, links and cells, and the file that finished cells are kept in."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from horovod_aps.bench.cases import parse_link
from horovod_aps.bench.cluster import rate_in_bits
from horovod_aps.bench.names import FEEDBACK, PACKED
from horovod_aps.formats import FLOAT32, Format, parse
from horovod_aps.tools import predict, shapes

PLAIN = ("fp32", "fp16")  # Horovod's own
METHODS = (*PLAIN, "e4m3", "e5m2", "e3m0+ef", "qsgd8", "qsgd4", "onebit+ef", "dynamic-tree", "mx-e4m3")
LOCAL = "shm"
Record = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network: how much there is to send, how much to compute, and which small relative of it trains on digits."""

    name: str
    macs: float = 0.0
    """Multiply-adds of one sample's forward pass."""
    n_samples: int = 1_281_167
    """Of one epoch; ImageNet's pictures, or sequences of 35 words of the Penn Treebank."""
    relative: str = ""

    @property
    def sizes(self) -> list[int]:
        """Element counts of the gradients."""
        return list(_sizes(self.name))


@lru_cache(maxsize=64)
def _sizes(name: str) -> tuple[int, ...]:
    return tuple(predict.model_sizes(name))


# Multiply-adds: torchvision's table of weights; for the LSTM 35 words times its matrices.
BUILT_IN = {
    one.name: one
    for one in (
        Network("alexnet", 0.71e9, relative="digits_fc"),
        Network("vgg16", 15.47e9, relative="digits_fc"),
        Network("resnet50", 4.09e9, relative="digits_conv"),
        Network("resnet152", 11.51e9, relative="digits_conv"),
        Network("inception_v3", 5.71e9, relative="digits_conv"),
        Network("lstm", 35 * (4 * 4 * 650 * 650 + 650 * 10_000), 929_589 // 35, "digits_lstm"),
    )
}
RELATIVES = ("digits_fc", "digits_conv", "digits_lstm")


def parse_network(text: str) -> str:
    """A network's name as it is, if there is such a one."""
    if text not in (*BUILT_IN, *RELATIVES, *shapes.MODELS) and ":" not in text:
        known = ", ".join((*BUILT_IN, *RELATIVES))
        raise argparse.ArgumentTypeError(f"network must be one of {known}, or module:name, got {text!r}")
    return text


def network_of(name: str) -> Network:
    """The built-in network, or one of which only the sizes are known."""
    return BUILT_IN.get(name) or Network(name)


def parse_method(text: str) -> str:
    """A method's name: "fp32", "fp16", or a format's text, with "+ef" for error feedback."""
    if text in PLAIN:
        return text
    pair = re.fullmatch(r"\(?(\d+),(\d+)\)?(\+ef)?", text)
    text = f"e{pair[1]}m{pair[2]}{pair[3] or ''}" if pair else text
    try:
        wire_format = format_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"method must be fp32, fp16, or a format such as e4m3, qsgd4 or onebit+ef, got {text!r}: {error}"
        ) from None
    if wire_format == FLOAT32:
        raise argparse.ArgumentTypeError("method float32 is called fp32")
    if wire_format.needs_error_feedback and not text.endswith(FEEDBACK):
        raise argparse.ArgumentTypeError(f"{text} needs error feedback: write {text}{FEEDBACK}")
    return text


def format_of(method: str) -> Format:
    """The format of a method that is not Horovod's own."""
    return parse(method.removesuffix(FEEDBACK))


def bench_name(method: str) -> str:
    """What `horovod_aps.bench` calls it."""
    return f"horovod_{method}" if method in PLAIN else PACKED + method


def bits_of(method: str) -> float:
    """Bits per element on the wire, side information included."""
    if method in PLAIN:
        return 32.0 if method == "fp32" else 16.0
    return 8 * format_of(method).bytes_for(1 << 20) / (1 << 20)


def check_link(text: str) -> str:
    """A link's text as it is, if it is one: "1gbit", "1gbit+5ms" or "shm"."""
    try:
        rate, _ = parse_link(text)
        if rate != LOCAL:
            rate_in_bits(rate)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def gbits(link: str) -> float | None:
    """Gbit/s of a link; None for shared memory."""
    rate, _ = parse_link(link)
    return None if rate == LOCAL else rate_in_bits(rate) / 1e9


@dataclass(frozen=True)
class Place:
    """Where methods are compared: all but the method of a cell."""

    kind: str
    """How its numbers came: "predicted", or measured as "synchronised", "trained" or "script"."""
    network: str
    link: str
    ranks: int
    launcher: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Place:
        """The place of a record."""
        return cls(*(record[name] for name in ("kind", "network", "link", "ranks", "launcher")))

    def __str__(self) -> str:
        return f"{self.kind}: {self.network}, {self.link}, {self.ranks} ranks, {self.launcher}"


class Store:
    """Finished cells as JSON lines; a line that was cut off when a study was killed does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = []
        lines = path.read_text().splitlines() if path.exists() else []
        for number, line in enumerate(lines):
            try:
                self.records.append(json.loads(line))
            except json.JSONDecodeError:
                if number + 1 < len(lines):
                    raise ValueError(
                        f"{path}: line {number + 1} is no JSON; remove it, or take another --out"
                    ) from None
                path.write_text("".join(f"{json.dumps(record)}\n" for record in self.records))

    def find(self, place: Place, method: str, settings: Mapping[str, Any]) -> Record | None:
        """The finished cell, run with these settings."""
        for record in self.records:
            if Place.of(record) == place and record["method"] == method and record["settings"] == settings:
                return record
        return None

    def add(self, records: Iterable[Record]) -> None:
        """Keep finished cells, at once."""
        found = list(records)
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in found)
        self.records += found


def seconds_to(record: Mapping[str, Any], target: float) -> float | None:
    """Seconds of training until the test accuracy was `target`; None if it never was."""
    for point in record.get("curve", ()):
        if point["accuracy"] is not None and point["accuracy"] >= target:
            return float(point["seconds"])
    return None
