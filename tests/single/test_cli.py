"""The horovod-aps command: what it prints, writes and rejects; calibrate runs for real on two ranks."""

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from horovod_aps.tools import calibrate, cli, perfmodel, predict, shapes
from horovod_aps.tools.perfmodel import KernelRates, Machine, Network


@pytest.mark.parametrize(
    "text,value",
    [
        ("1gbit", 1.25e8),
        ("100mbit", 1.25e7),
        ("1.5GB", 1.5e9),
        ("10Gbit/s", 1.25e9),
        ("8bit", 1.0),
        ("2kb", 2e3),
    ],
)
def test_parse_bandwidth(text, value):
    assert predict.parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize("text,value", [("50us", 50e-6), ("5ms", 5e-3), ("0.1s", 0.1), ("2", 2.0)])
def test_parse_time(text, value):
    assert predict.parse_time(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "parse,text",
    [
        (predict.parse_bandwidth, "fast"),
        (predict.parse_bandwidth, "1gbyte"),
        (predict.parse_time, "soon"),
        (predict.parse_format, "4"),
        (predict.parse_format, "9,3"),
        (predict.parse_format, "4,24"),
    ],
)
def test_parsers_reject(parse, text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
        parse(text)


def test_predict_prints_the_models_numbers(capsys, tmp_path):
    """Oracle: perfmodel called directly on the shapes of ResNet-50."""
    out = tmp_path / "p.json"
    plot = tmp_path / "p.png"
    arguments = (
        "predict --model resnet50 --ranks 2 4 --bandwidth 1gbit 10gbit --format 4,3 3,0 --backward-ms 100"
    )
    assert cli.main([*arguments.split(), "--scaling", "--json", str(out), "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "resnet50: 161 layers, 25.56 M parameters" in text
    records = json.loads(out.read_text())["predictions"]
    assert len(records) == 2 * 2 * 4 + 10 * 4
    sizes = [math.prod(shape) for _, shape in shapes.layer_shapes("resnet50")]
    link = Network(bandwidth=1.25e9)
    (record,) = [r for r in records if (r["bandwidth"], r["ranks"], r["method"]) == (1.25e9, 4, "aps(3,0)")]
    expected = perfmodel.predict_exchange(sizes, 4, link, Machine(), 3, 0, backward=0.1)
    assert record["total_s"] == pytest.approx(expected.total)
    assert record["efficiency"] == pytest.approx(0.1 / expected.total)
    fp32 = perfmodel.predict_ring(sizes, 4, link, Machine(), backward=0.1).total
    assert record["speedup"] == pytest.approx(fp32 / expected.total)
    assert f"{1e3 * expected.total:.1f}" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_predict_finds_a_model_in_the_current_folder(capsys, tmp_path, monkeypatch):
    (tmp_path / "model_here.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert cli.main(["predict", "--model", "model_here:build", "--ranks", "2"]) == 0
    assert "model_here:build: 2 layers" in capsys.readouterr().out


def test_predict_of_one_rank_is_free(capsys):
    assert cli.main(["predict", "--ranks", "1", "2"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|     1 |" in line]
    assert [row[4].strip() for row in rows[:3]] == ["0.0"] * 3 and [row[5].strip() for row in rows[:3]] == ["1.00x"] * 3


def test_predict_bandwidth_is_nominal_after_calibration(capsys, tmp_path):
    """A calibrated rate is payload, one given by hand is not: frame headers take their share of it again."""
    path, out = tmp_path / "c.json", tmp_path / "p.json"
    perfmodel.save_calibration(path, Network(bandwidth=5e6, efficiency=1.0, host_rate=1e9), Machine(), {})
    common = ["predict", "--ranks", "2", "--calibration", str(path), "--backward-ms", "50"]
    assert cli.main([*common, "--bandwidth", "1gbit", "--json", str(out)]) == 0
    sizes = shapes.layer_sizes("resnet50")
    link = Network(bandwidth=1.25e8, host_rate=1e9)
    expected = perfmodel.predict_ring(sizes, 2, link, Machine(), backward=0.05).total
    assert json.loads(out.read_text())["predictions"][0]["total_s"] == pytest.approx(expected)
    # The break-even table knows of backward and of the network stack's rate, too.
    limit = perfmodel.break_even_bandwidth(sizes, 2, link, Machine(), backward=0.05)
    assert predict.show_bandwidth(limit) in capsys.readouterr().out.split("APS pays")[1]
    assert cli.main([*common, "--json", str(out)]) == 0  # without --bandwidth, as calibrated
    expected = perfmodel.predict_ring(sizes, 2, replace(link, bandwidth=5e6, efficiency=1), Machine(), backward=0.05)
    assert json.loads(out.read_text())["predictions"][0]["total_s"] == pytest.approx(expected.total)


def test_predict_takes_users_model_and_calibration(capsys, tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(10, 3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "c.json"
    perfmodel.save_calibration(path, Network(bandwidth=5e6, latency=0.5), Machine(), {})
    assert cli.main(["predict", "--model", "mymodel:build", "--ranks", "2", "--calibration", str(path)]) == 0
    text = capsys.readouterr().out
    assert "mymodel:build: 2 layers, 0.00 M parameters" in text
    expected = perfmodel.predict_ring([30, 3], 2, Network(bandwidth=5e6, latency=0.5), Machine()).total
    assert expected > 1 and f"{1e3 * expected:.1f}" in text  # the latency of 0.5 s was used


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model", "resnet51"], "--model must be one of resnet50"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--calibration", "/does/not/exist.json"], "No such file"),
        (["--model", "nosuchmodule:build"], "--model must be module:function that can be imported, got 'nosuch"),
        (["--model", "torch:nosuchfunction"], "--model must be module:function that can be imported"),
        (["--ranks-per-host", "0"], "ranks_per_host must be at least 1, got 0"),
    ],
)
def test_predict_mistakes_are_one_line(arguments, message, capsys):
    assert cli.main(["predict", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("horovod-aps predict: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_calibrate_derives_the_parameters_behind_the_times(n_ranks):
    """Oracle: times computed forwards from known parameters must give those parameters back."""
    n, n_tensors = 6_400_000, 64
    network = Network(bandwidth=1e8, latency=1e-4, efficiency=1.0, allreduce="openmpi")
    rates = KernelRates(scan=9e9, encode=5e9, reduce=3e9, decode=4e9)
    machine = Machine(
        kernels={"4,3": rates}, copy_rate=3e9, add_rate=2e9, add16_rate=1e9, cast_rate=5e9,
        tensor_overhead=3e-5, layer_overhead=2e-5, cycle_time=1e-3, bucket_bytes=n, overlap=0.4,
        calibrated_ranks=n_ranks,
    )  # fmt: skip
    many, tiny = [n // n_tensors] * n_tensors, [8] * n_tensors

    def ring(sizes, bits=32):
        # Horovod's ring runs all of its stages in a row: no overlap within one fused buffer.
        return perfmodel.predict_ring(sizes, n_ranks, network, machine, bits).total

    def ours(sizes):
        return perfmodel.predict_exchange(sizes, n_ranks, network, machine).total

    link_bytes = n // n_ranks
    measured = {
        "elements": n, "tensors": n_tensors, "format": "4,3", "bucket_bytes": n, "allreduce": "openmpi",
        "links": {"bytes": link_bytes, "small": 1e-4, "large": 1e-4 + (n_ranks - 1) * link_bytes / 1e8},
        "synchronise": {"fp32 small": ring([8]), "fp32 tiny": ring(tiny), "fp32 flat": ring([n]),
                        "fp32 many": ring(many), "fp16 flat": ring([n], 16), "aps tiny": ours(tiny),
                        "aps many": ours(many)},
        "kernels": {"4,3": {name: 4 * n / getattr(rates, name) for name in ("scan", "encode", "reduce",
        "decode")}}, "casts": 8 * n / 5e9,
    }  # fmt: skip
    got_network, got = calibrate.derive(measured, n_ranks, 1, math.inf)
    assert got_network.bandwidth == pytest.approx(1e8) and got_network.latency == pytest.approx(1e-4)
    for name in (
        "copy_rate",
        "add_rate",
        "add16_rate",
        "cast_rate",
        "tensor_overhead",
        "cycle_time",
        "overlap",
    ):
        assert getattr(got, name) == pytest.approx(getattr(machine, name), rel=0.05), name
    assert got.layer_overhead == pytest.approx(machine.layer_overhead, rel=0.2)
    assert got.kernels["4,3"] == rates


def test_calibrate_measures_on_two_ranks(tmp_path):
    """A real run; the file must load, and predict must accept it."""
    out = tmp_path / "cal.json"
    command = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        sys.executable,
        "-m",
        "horovod_aps.tools.cli",
    ]
    command += [
        "calibrate",
        "--out",
        str(out),
        "--elements",
        "100000",
        "--repetitions",
        "3",
        "--format",
        "4,3",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    network, machine = perfmodel.load_calibration(out)
    assert network.ranks_per_host == 2 and machine.calibrated_ranks == 2
    assert 1e6 <= network.intra_bandwidth <= 1e12 and 0 <= machine.overlap <= 1
    assert set(machine.kernels) == {"4,3"} and "written:" in done.stdout
    assert cli.main(["predict", "--calibration", str(out), "--model", "mobilenet_v2", "--ranks", "2"]) == 0


def test_calibrate_needs_ranks(capsys):
    assert cli.main(["calibrate", "--elements", "10"]) == 2
    assert "--elements must be at least 64" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "horovod_aps.tools.cli", "calibrate"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "needs at least 2 ranks, got 1" in done.stderr


def test_command_without_subcommand_shows_usage(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 2
    assert "calibrate" in capsys.readouterr().err


def test_a_reader_that_leaves_early_is_no_error():
    """As in `horovod-aps predict | head`: the pipe's other end is closed before anything is written."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "horovod_aps.tools.cli", "predict", "--model", "resnet50"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
