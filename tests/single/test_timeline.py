"""Trace lines and timeline files of an exchange over emulated ranks, and merging with Horovod's own timeline.

Oracle: the order of phases in the module docstring of `horovod_aps.engine.exchange`, and bytes counted by hand.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from horovod_aps import config, timeline
from horovod_aps.engine.exchange import local_allreduce
from horovod_aps.engine.layer import Layer
from horovod_aps.kernels import CpuKernels
from horovod_aps.log import logger
from horovod_aps.options import Options
from horovod_aps.tools import cli
from horovod_aps.tools.timeline import merge

TWO_RANKS = ["APS_SCAN", "APS_EXPONENTS", "APS_ENCODE", "APS_ALLGATHER", "APS_DECODE"]
THREE_RANKS = [*TWO_RANKS[:3], "APS_ALLTOALL", "APS_REDUCE", "APS_ALLGATHER", "APS_DECODE"]


def reduce_once(n_ranks: int) -> None:
    arrays = [np.arange(48, dtype=np.float32) for _ in range(n_ranks)]
    layers = [[Layer("w", x.shape, 0, x.ctypes.data, x.ctypes.data, 1.0, x)] for x in arrays]
    local_allreduce(layers, Options(4, 3), CpuKernels())


def read(path):
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def launched(monkeypatch, **variables):
    """As a launcher starts us that sets these variables."""
    for name in [name for names in config.LAUNCHERS for name in names]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}  # in an sbatch script, whatever it starts
SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "4", "PMIX_RANK": "3"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    "variables, rank, size",
    [
        ({}, None, None),
        (BATCH, None, None),
        (SRUN, "3", "4"),
        (MPIRUN, "1", "2"),
        ({"HOROVOD_RANK": "5", "HOROVOD_SIZE": "6"}, "5", "6"),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, "0", "3"),
        ({"PMIX_RANK": "2"}, "2", None),
        (BATCH | MPIRUN, "1", "2"),
        (SRUN | MPIRUN, "1", "2"),
        (SRUN | {"HOROVOD_RANK": "5", "HOROVOD_SIZE": "6"}, "5", "6"),
        ({"HOROVOD_RANK": "-1"} | MPIRUN, "1", "2"),
    ],
)
def test_rank_and_size_are_the_innermost_launchers(variables, rank, size, tmp_path, monkeypatch):
    """Oracle: Slurm's manual (srun's and sbatch's output variables), Open MPI's and Horovod's launchers."""
    launched(monkeypatch, **variables)
    assert (config.launcher_rank(), config.launcher_size()) == (rank, size)
    monkeypatch.setenv("HOROVOD_APS_TIMELINE", str(tmp_path / "t.json"))
    assert config.timeline_file() == tmp_path / f"t.rank{rank or 0}.json"


@pytest.mark.parametrize("n_ranks, wanted", [(2, TWO_RANKS), (3, THREE_RANKS)])
def test_timeline_shows_all_phases_in_order(n_ranks, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_APS_TIMELINE", str(tmp_path / "trace.json"))
    launched(monkeypatch, HOROVOD_RANK="1", HOROVOD_SIZE="4")
    reduce_once(n_ranks)
    events = read(tmp_path / "trace.rank1.json")
    assert sorted(e["name"] for e in events) == sorted(wanted * n_ranks)
    begins = sorted(events, key=lambda e: e["ts"])
    firsts = list(dict.fromkeys(e["name"] for e in begins))
    assert firsts == list(dict.fromkeys(wanted))
    assert all(e["dur"] >= 0 and e["args"]["layers"] == 1 and e["args"]["step"] == 0 for e in events)
    if n_ranks == 2:  # 48 elements of 8 bits
        assert [e["args"]["bytes"] for e in events if e["name"] == "APS_ALLGATHER"] == [48, 48]
    else:  # two thirds scattered; a third and its 2-byte exponent to two others
        assert [e["args"]["bytes"] for e in events if e["name"] == "APS_ALLTOALL"] == [32] * 3
        assert [e["args"]["bytes"] for e in events if e["name"] == "APS_ALLGATHER"] == [36] * 3


def test_timeline_is_valid_json_after_every_event(tmp_path):
    file = timeline.TimelineFile(tmp_path / "t.json")
    for i in range(3):
        file.add("APS_SCAN", i, 0, 1000, {})
        assert len(read(tmp_path / "t.json")) == i + 1


def test_no_file_and_no_lines_unless_asked(tmp_path, monkeypatch):
    monkeypatch.delenv("HOROVOD_APS_TIMELINE", raising=False)
    assert timeline.phases(0, 0, 1) is timeline.phases(5, 5, 5)
    monkeypatch.chdir(tmp_path)
    reduce_once(2)
    assert not list(tmp_path.iterdir())


def test_debug_log_prints_phases_with_rank(monkeypatch, capsys):
    launched(monkeypatch, HOROVOD_RANK="3", HOROVOD_SIZE="4")
    lines = []
    handler = logging.StreamHandler()
    handler.emit = lambda record: lines.append(logger.handlers[0].format(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    try:
        reduce_once(2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel("WARNING")
    for phase in TWO_RANKS:
        assert sum(f"step 0 bucket 0 (1 layers): {phase}" in line for line in lines) == 2
    assert all(line.startswith("[horovod_aps rank 3 ") for line in lines)


def test_merge_shifts_to_one_axis_and_refuses_foreign_files(tmp_path, capsys):
    """Oracle: times by hand. The first file is as Horovod 0.28.1 writes it."""
    (tmp_path / "hvd.json").write_text(
        '[\n{"name": "process_name", "ph": "M", "pid": 0, '
        '"args": {"start_time_since_epoch_in_micros":1000}},\n'
        '{"ph": "B", "name": "ALLREDUCE", "ts": 50, "pid": 1}]'
    )
    ours = [
        {"ph": "M", "name": "process_name", "pid": 9, "args": {timeline.START_KEY: 1200}},
        {"ph": "X", "name": "APS_SCAN", "ts": 7, "dur": 1, "pid": 9, "tid": 0},
    ]
    (tmp_path / "aps.json").write_text(json.dumps(ours))
    out = tmp_path / "merged.json"
    files = [str(tmp_path / "hvd.json"), str(tmp_path / "aps.json")]
    assert cli.main(["timeline", *files, "--output", str(out)]) == 0
    times = {e["name"]: e["ts"] for e in json.loads(out.read_text()) if "ts" in e}
    assert times == {"ALLREDUCE": 50, "APS_SCAN": 207}
    before = out.read_text()
    assert cli.main(["timeline", *files[:1], "--output", str(out)]) == 2 and out.read_text() == before
    assert "merged.json is there already; name another by --output, or add --force" in capsys.readouterr().err
    assert cli.main(["timeline", *files[:1], "--output", str(out), "--force"]) == 0 and out.read_text() != before
    assert cli.main(["timeline", *files, "--output", files[0], "--force"]) == 2
    assert "--output must not be one of the files to merge" in capsys.readouterr().err
    for text in ("not json", "[]", "{}", "[1]", '[{"args": 3}]'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match="bad.json must be a timeline"):
            merge([tmp_path / "bad.json"])


@pytest.mark.parametrize(
    "variable, value, text",
    [
        ("HOROVOD_APS_LOG", "loud", "HOROVOD_APS_LOG must be one of debug, info, warning, error, got 'loud'"),
        ("HOROVOD_APS_TIMELINE", "/no/such/t.json", "HOROVOD_APS_TIMELINE must be a file in a folder that"),
        ("HOROVOD_APS_NUM_THREADS", "0", "HOROVOD_APS_NUM_THREADS must be in 1..1024, got 0"),
        ("HOROVOD_APS_AVX2", "yes", "HOROVOD_APS_AVX2 must be an integer in 0..1, got 'yes'"),
        ("HOROVOD_APS_AVX512", "2", "HOROVOD_APS_AVX512 must be in 0..1, got 2"),
    ],
)
def test_malformed_variables_are_refused(variable, value, text, monkeypatch):
    monkeypatch.setenv(variable, value)
    readers = {
        "HOROVOD_APS_LOG": config.log_level,
        "HOROVOD_APS_TIMELINE": config.timeline_file,
        "HOROVOD_APS_NUM_THREADS": config.num_threads,
        "HOROVOD_APS_AVX2": config.vectors,
        "HOROVOD_APS_AVX512": config.vectors,
    }
    with pytest.raises(ValueError) as caught:
        readers[variable]()
    assert text in str(caught.value)


def test_environment_is_read_in_config_only():
    """Oracle: the sources themselves. Others may set a variable for processes that they start."""
    folder = Path(config.__file__).parent
    read = re.compile(r"(environ\.get|getenv)\(.*HOROVOD_APS_|environ\[.*HOROVOD_APS_[^]]*\](?! = )")
    offenders = [
        path.name for path in folder.rglob("*.py") if path.name != "config.py" and read.search(path.read_text())
    ]
    assert offenders == []


def test_log_level_comes_from_the_environment():
    code = "from horovod_aps.log import trace; trace('seen %d', 7)"
    env = {"HOROVOD_APS_LOG": "DEBUG", "HOROVOD_RANK": "2", "HOROVOD_SIZE": "4"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stderr.startswith("[horovod_aps rank 2 ") and "seen 7" in run.stderr
