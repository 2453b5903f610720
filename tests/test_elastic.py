"""Elastic jobs under `horovodrun --host-discovery-script`: a worker is killed, another one is added, training goes on.

Oracles: the sum of ones over all ranks, which is the world size; checksums of the weights, which must be the same on
all ranks of a step; the elements that residuals must have; and the log of every worker. All "hosts" are names of this
machine.
"""

from __future__ import annotations

import json
import socket
import sys
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_parallel import HOROVODRUN, ROOT, run

LIMIT = 400


def rows_of(folder: Path) -> list[dict]:
    """All lines of all workers, in the order of time."""
    rows = [json.loads(line) for log in folder.glob("*.jsonl") for line in log.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["time"])


def start(framework: str, folder: Path, hosts: dict[str, int], plan: dict, n_workers: int) -> tuple[str, list[dict]]:
    """Run an elastic job to its good end; returns its story, for failures, and the rows of all workers."""
    (folder / "hosts").write_text("".join(f"{host}:{slots}\n" for host, slots in hosts.items()))
    (folder / "plan.json").write_text(json.dumps(plan))
    script = folder / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    n = str(n_workers)
    command = [
        str(HOROVODRUN),
        "-np",
        n,
        "--min-np",
        "1",
        "--max-np",
        n,
        "--host-discovery-script",
        str(script),
        sys.executable,
        str(ROOT / "tests" / "elastic_worker.py"),
        framework,
        str(folder),
    ]
    code, output = run(command, LIMIT, {"HOROVOD_GLOO_TIMEOUT_SECONDS": "60"})
    rows = rows_of(folder)
    story = f"{framework}: exit code {code}\n{output[-6000:]}\n" + "\n".join(map(str, rows[-12:]))
    assert code == 0, story
    worlds = defaultdict(list)
    for row in rows:
        assert row["total"] == row["size"], story  # the sum of ones over all ranks
        worlds[row["step"], row["size"]].append(row)
        assert [tuple(key) for key in row["exchanges"]] == [(row["size"], row["rank"])], story
    for pid in {row["pid"] for row in rows}:  # a worker that goes on keeps its statistics
        sent = [row["bytes"] for row in rows if row["pid"] == pid]
        assert sent[0] > 0 and sent == sorted(set(sent)), story
    for (step, size), world in worlds.items():
        assert len({row["checksum"] for row in world}) == 1, f"replicas differ at step {step} of {size}\n{story}"
        # Residuals of all layers (parameters and the sum), once per rank or per host, and nothing of another layout.
        once = size if world[0]["way"].startswith("flat") else len({row["host"] for row in world})
        n_elements = 20 * 50 + 50 + 1000 + (50 + 1 if framework == "torch" else 0)
        assert len(world) == size and sum(row["residuals"] for row in world) == once * n_elements, story
    steps = [row["step"] for row in rows if row["rank"] == 0]
    assert steps == sorted(steps) and len(set(steps)) == steps[-1], story  # none lost, none counted twice
    return story, rows


def for_both(check: Callable[[str, Path], None], folder: Path) -> None:
    """Run a check with PyTorch and with TensorFlow at the same time: elastic jobs spend theirs waiting."""
    folders = {framework: folder / framework for framework in ("torch", "tensorflow")}
    for path in folders.values():
        path.mkdir()
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(check, framework, path) for framework, path in folders.items()]:
            done.result()


def test_killed_host_and_added_host(tmp_path):
    """2 workers on each of 2 hosts, then one host after a kill -9, then 2 again: two levels, flat, two levels."""
    victim, late = "127.0.0.1", socket.gethostname()
    plan = {"victim": victim, "late": late, "slots": 2, "size": 4}

    def check(framework: str, folder: Path) -> None:
        story, rows = start(framework, folder, {"localhost": 2, victim: 2}, plan, 4)
        ways = []
        for row in rows:
            if row["rank"] == 0 and (not ways or ways[-1] != (row["size"], row["way"])):
                ways.append((row["size"], row["way"]))
        two_levels = (4, "two-level (2 hosts with 2 ranks)")
        assert ways == [two_levels, (2, "flat (all ranks are on one host)"), two_levels], story
        assert {row["host"] for row in rows if row["step"] == rows[-1]["step"]} == {"localhost", late}, story
        assert not any(row["host"] == victim and row["step"] > 4 for row in rows), story

    for_both(check, tmp_path)


@pytest.mark.slow
def test_killed_worker_is_replaced_at_once(tmp_path):
    """A spare host steps in during the same reset: the survivor sees neither its rank nor the size change."""
    hosts = {"localhost": 1, "127.0.0.1": 1, socket.gethostname(): 1}  # two of them at a time, in any order

    def check(framework: str, folder: Path) -> None:
        story, rows = start(framework, folder, hosts, {"victim": 1, "late": "localhost", "slots": 1, "size": 2}, 2)
        victim = (folder / "killed").read_text()
        before = {row["host"] for row in rows if row["step"] <= 4}
        after = {row["host"] for row in rows if row["step"] > 5}
        assert {row["size"] for row in rows} == {2}, story
        assert victim in before and victim not in after and after == set(hosts) - {victim}, story

    for_both(check, tmp_path)
