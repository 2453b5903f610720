"""The CPU library runs on every processor of its architecture: newer instructions stand only where they are asked for.

Nobody asks while the library is loaded, so nothing that runs then may have them. Oracle: the disassembler.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

from horovod_aps.kernels import library

OWN = re.compile(r"aps_avx2::|aps_avx512::|act_avx2::|\.arch_x86_64_v[34]|\.(avx2|avx512)")  # chosen at run time
NEWER = re.compile(r"%[yz]mm|%k[0-7]|\bv(?!err|erw|mcall|mread)[a-z]+[0-9a-z]* .*%xmm")

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="there are no such loops elsewhere")


@pytest.fixture(scope="module")
def functions() -> dict[str, list[str]]:
    """The instructions of the library by function."""
    command = ["objdump", "-d", "-C", "--no-show-raw-insn", library()._name]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found: dict[str, list[str]] = {}
    for part in re.split(r"\n\n(?=[0-9a-f]+ <)", text)[1:]:
        head, *lines = part.splitlines()
        found.setdefault(head.split(" <", 1)[1].rstrip(">:"), []).extend(line.split("\t", 1)[-1] for line in lines)
    return found


def test_the_disassembler_sees_the_loops(functions):
    own = [lines for name, lines in functions.items() if OWN.search(name)]
    assert len(own) > 20 and any(NEWER.search(line) for lines in own for line in lines), Path(library()._name)


def test_newer_instructions_only_where_they_are_asked_for(functions):
    found = {
        name: line for name, lines in functions.items() if not OWN.search(name) for line in lines if NEWER.search(line)
    }
    assert not found


def test_loading_calls_no_loop_for_newer_processors(functions):
    started = {name: lines for name, lines in functions.items() if "_GLOBAL__sub_I" in name or "_GLOBAL_sub_I" in name}
    assert not [(name, line) for name, lines in started.items() for line in lines if OWN.search(line)]
