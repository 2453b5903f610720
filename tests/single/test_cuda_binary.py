"""What NVIDIA's compilers make of the kernels, for real architectures; oracle: NVRTC, ptxas and nvdisasm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import roofline  # noqa: E402

KERNELS = ["scan", "encode", "decode", "reduce_scan", "reduce", "residual", "add"]
BUCKET_KERNELS = {
    *(f"{name}_bucket_kernel" for name in ("encode", "decode", "reduce_scan", "reduce", "residual", "measure")),
    *(f"{name}_sides_kernel" for name in ("encode", "reduce", "table")),
}
# So many loads and stores of 16 bytes at least: two per group of float32 gradients and one of half precision, for each
# family; some also of codes, 16 or 32 bits wide.
LOADS, STORES = {"scan": 3, "encode": 6, "residual": 11, "add": 5}, {"decode": 6, "residual": 6, "add": 2}

# In PTX: v4 as above, and codes of 16 and 32 bits; v2 are codes of 8 bits; single words also codes of 4.
WORDS: dict[tuple[str, str], dict[str, int]] = {
    ("ld", r"v4\.u32"): {**LOADS, "decode": 13, "reduce_scan": 9, "reduce": 13},
    ("st", r"v4\.u32"): {**STORES, "encode": 5, "reduce": 5},
    ("ld", r"v2\.u32"): {"decode": 2, "reduce_scan": 2, "reduce": 2, "residual": 1},
    ("st", r"v2\.u32"): {"encode": 1, "reduce": 1},
    ("ld", "u32"): {"decode": 4, "reduce_scan": 3, "reduce": 5, "residual": 18},
    ("st", "u32"): {"encode": 1, "reduce": 1},
}


@pytest.mark.parametrize("architecture", roofline.ARCHITECTURES)
def test_kernels_use_no_local_memory(architecture: str) -> None:
    found = roofline.resources(architecture)
    wanted = {f"{name}{kind}_kernel" for name in KERNELS for kind in ("", "_wide")} | {"measure_kernel"}
    assert set(found) == wanted | BUCKET_KERNELS
    assert {name for name, used in found.items() if used["stack"] or used["spilled"]} == set()
    common = {name: found[f"{name}_kernel"]["registers"] for name in KERNELS}
    assert max(common.values()) <= 64, common  # 4 blocks of 256 threads on every architecture


@pytest.mark.parametrize("architecture", roofline.DISASSEMBLED)
def test_kernels_move_whole_words(architecture: str) -> None:
    """Gradients by 16 bytes, codes of 8 bits by 8 bytes; a reduction per warp; no arithmetic in double."""
    found = roofline.disassembly(architecture)
    assert found, "no ptxas and nvdisasm; make setup installs them"
    for name in KERNELS:
        text = "\n".join(found[f"{name}_kernel"])
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} has local memory"
        assert not re.search(r"\b(DADD|DMUL|DFMA)\b", text), f"{name} computes in double"
        for what, verb, wanted in (("loads", "LD", LOADS), ("stores", "ST", STORES)):
            n_wide = len(re.findall(rf"\b{verb}G?\.E[.\w]*128", text))
            assert n_wide >= wanted.get(name, 0), f"{name} {what} single elements"
        if name in ("encode", "reduce"):
            assert re.search(r"\bSTG?\.E[.\w]*64", text), f"{name} stores single codes"
        if name in ("decode", "reduce", "reduce_scan", "residual"):
            assert re.search(r"\bLDG?\.E[.\w]*64", text), f"{name} loads single codes"
        assert ("SHFL" in text or "REDUX" in text) == (name in ("scan", "reduce_scan"))


def test_kernels_move_whole_words_on_sm_70() -> None:
    """In PTX, for nvdisasm does not know it any more; which of them use local memory is seen above, for all.

    PTX tells vectors of words from addresses: all that is loaded and stored at once is counted, codes too.
    """
    assert set(roofline.ARCHITECTURES) == {"70", *roofline.DISASSEMBLED}
    found = roofline.ptx("70")
    for name in KERNELS:
        text = "\n".join(found[f"{name}_kernel"])
        assert not re.search(r"\b(ld|st)\.local|\.local \.align|\b(add|mul|fma)(\.r[nz])?\.f64", text), name
        for (verb, kind), wanted in WORDS.items():
            n_words = len(re.findall(rf"\b{verb}(?:\.global)?(?:\.nc)?\.{kind}\s", text))
            assert n_words >= wanted.get(name, 0), f"{name}: {n_words} of {verb}.{kind}"


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_is_predicted() -> None:
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    for row in roofline.predict():
        if row["device"] == "A100 40GB":
            assert f"| {row['kernel']} | {row['bytes']} | {row['instructions']:.1f} | {row['registers']} |" in text
