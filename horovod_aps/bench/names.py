"""The methods' names: which there are, what tables call them, what they send."""

from horovod_aps.formats import Format, parse

DEFAULT_METHODS = (
    "horovod_fp32",
    "horovod_fp16",
    "aps_5_2",
    "aps_4_3",
    "aps_3_2",
    "aps_3_0",
    "ddp_fp32",
    "ddp_fp16",
)
# Right only in one bucket, and slow on CPUs; the default selection has them once.
EXTRA_METHODS = ("ddp_powersgd", "ddp_quant8")
# The other families, once in the default selection.
FORMAT_METHODS = (
    "packed:qsgd4",
    "packed:qsgd8",
    "packed:onebit-column+ef",
    "packed:dynamic-tree",
    "packed:mx-e4m3",
)
# What a user of DDP chooses among.
DDP_METHODS = ("ddp_fp32", "ddp_fp16", "ddp_bf16", "ddp_powersgd", "ddp_aps_4_3")
FLAT = "_flat"  # at the end of a method's name: without a level of its own for the ranks of a host

PACKED = "packed:"  # at the start of one: any format, by its text
FEEDBACK = "+ef"


def packed_format(name: str) -> tuple[Format, bool]:
    """The format of "packed:<format>[+ef]", such as "packed:qsgd4", and whether error feedback goes with it."""
    text = name.removeprefix(PACKED)
    return parse(text.removesuffix(FEEDBACK)), text.endswith(FEEDBACK)


def bits_of(name: str) -> tuple[int, int]:
    """e and m of "aps_<e>_<m>[_flat]" and "ddp_aps_<e>_<m>"."""
    kind, *bits = name.removeprefix("ddp_").removesuffix(FLAT).split("_")
    if kind != "aps" or len(bits) != 2 or not all(text.isdigit() for text in bits):
        raise ValueError(f"make_method: unknown method {name!r}; known are {', '.join(DEFAULT_METHODS)}")
    return int(bits[0]), int(bits[1])


def label(name: str) -> str:
    """How tables and plots call a method."""
    fixed = {
        "horovod_fp32": "Horovod fp32",
        "horovod_fp16": "Horovod fp16",
        "ddp_fp32": "DDP (Gloo)",
        "ddp_fp16": "DDP fp16 hook",
        "ddp_bf16": "DDP bf16 hook",
        "ddp_powersgd": "DDP PowerSGD",
        "ddp_quant8": "DDP 8-bit hook",
    }
    if name in fixed:
        return fixed[name]
    if name.startswith(PACKED):
        wire_format, feedback = packed_format(name)
        return f"{wire_format}, error feedback" if feedback else str(wire_format)
    text = ("DDP " if name.startswith("ddp_") else "") + "APS ({}, {})".format(*bits_of(name))
    return text + (", flat" if name.endswith(FLAT) else "")


def bits_per_element(name: str) -> float | None:
    """Bits per element of what a method sends around the ring; None if it is no ring."""
    if name.removeprefix("ddp_").startswith("aps_"):
        return 1.0 + sum(bits_of(name))
    if name.startswith(PACKED):
        return 8 * packed_format(name)[0].bytes_for(1 << 20) / (1 << 20)
    return {"fp32": 32.0, "fp16": 16.0, "bf16": 16.0}.get(name.split("_")[1])
