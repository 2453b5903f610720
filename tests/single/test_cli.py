"""The horovod-aps command: what it prints, writes and rejects; calibrate runs for real on two ranks."""

import argparse
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import horovod_aps
from horovod_aps.tools import calibrate, cli, perfmodel, predict, shapes
from horovod_aps.tools.perfmodel import Calibration, KernelRates, Machine, Network


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


@pytest.mark.parametrize("text,value", [("50us", 50e-6), ("5ms", 5e-3), ("0.1s", 0.1), ("7ns", 7e-9)])
def test_parse_time(text, value):
    assert predict.parse_time(text) == pytest.approx(value)


@pytest.mark.parametrize(
    "parse,text",
    [
        (predict.parse_bandwidth, "fast"),
        (predict.parse_bandwidth, "1gbyte"),
        (predict.parse_bandwidth, "0gbit"),
        (predict.parse_bandwidth, "1.2.3gbit"),
        (predict.parse_time, "soon"),
        (predict.parse_time, "5"),  # seconds? microseconds?
        (predict.parse_time, "-5us"),
        (predict.parse_milliseconds, "-5"),
        (predict.parse_milliseconds, "nan"),
        (predict.parse_milliseconds, "inf"),
        (predict.parse_milliseconds, "5us"),
        (predict.parse_count, "0"),
        (predict.parse_count, "-2"),
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
    arguments = "predict --model resnet50 --ranks 2 4 --bandwidth 1gbit 10gbit --format 4,3 3,0 --backward-ms 100"
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
    """As a function, a class, an instance, and an attribute of one; models of Keras, too, by what they offer."""
    (tmp_path / "model_here.py").write_text(
        "import types\nimport torch\n"
        "def build():\n    return torch.nn.Linear(2, 3)\n"
        "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 3)\n"
        "instance, broken, number = Net(), lambda: 3, 3\n"
        "keras = types.SimpleNamespace(trainable_variables=[torch.zeros(2, 3), torch.zeros(3)])\n"
        "unbuilt = types.SimpleNamespace(trainable_variables=[])\n"
        "def needs():\n    raise AttributeError('inside')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("build", "Net", "instance", "keras", "Net.mro.__self__"):
        assert cli.main(["predict", "--model", f"model_here:{name}", "--ranks", "2"]) == 0, name
        assert f"model_here:{name}: 2 layers, 0.00 M parameters" in capsys.readouterr().out
    for name, message in (
        ("broken", "got model_here:broken, which is a int"),
        ("number", "which is a int"),
        ("unbuilt", "a Keras model must be built"),
        ("Nets", "can be imported"),
    ):
        assert cli.main(["predict", "--model", f"model_here:{name}"]) == 2
        assert message in capsys.readouterr().err, name
    with pytest.raises(AttributeError, match="inside"):  # the user's own error is not called one of import
        cli.main(["predict", "--model", "model_here:needs"])


def test_predict_is_a_function_too(capsys):
    """Oracle: the command's own output."""
    text = str(horovod_aps.predict("resnet50", ranks=[2, 8], bandwidth="1gbit", backward_ms=120, ranks_per_host=2))
    command = "predict --model resnet50 --ranks 2 8 --bandwidth 1gbit --backward-ms 120 --ranks-per-host 2"
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == text + "\n"
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5, bias=False))
    model[0].bias.requires_grad_(False)
    found = horovod_aps.predict(model, ranks=2)
    assert found.sizes == [200, 100] and {record["method"] for record in found.records} == {"fp32", "fp16", "aps(4,3)"}
    assert horovod_aps.predict([200, 100], ranks=2).records == found.records
    for wrong, message in (
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"bandwidth": "fast"}, "must look like 1gbit"),
        ({"backward_ms": math.nan}, "backward_ms must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            horovod_aps.predict("resnet50", **wrong)


def test_predict_never_says_always_where_its_own_numbers_say_otherwise(capsys, tmp_path):
    """Over all methods, links and ranks that one command prints; four ranks per host lose to fp16 somewhere."""
    out, n_lost = tmp_path / "p.json", 0
    for local in ("1", "4", "8"):
        arguments = f"predict --ranks 8 16 --ranks-per-host {local} --bandwidth 1gbit 3gbit 10gbit 100gbit"
        assert cli.main([*arguments.split(), "--backward-ms", "60", "--json", str(out)]) == 0
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
        said = {int(row[1]): row[2:] for row in rows if len(row) == 4 and row[1].isdecimal()}
        records = json.loads(out.read_text())["predictions"]
        times = {(one["bandwidth"], one["ranks"], one["method"]): one["total_s"] for one in records}
        for (bandwidth, n, method), seconds in times.items():
            if method == "aps(4,3)":
                continue
            lost = seconds <= times[bandwidth, n, "aps(4,3)"]
            n_lost += lost
            text = said[n][method == "fp16"]
            pays = False
            for part in text.split(" and "):
                numbers = [float(word) * 1.25e8 for word in re.findall(r"[\d.e+]+(?= |$)", part)]
                low = 0 if part == "always" or part.startswith("below") else numbers[0] if numbers else math.inf
                high = math.inf if part == "always" or part.startswith("above") else numbers[-1] if numbers else 0
                pays |= low * 0.99 <= bandwidth <= high * 1.01
            assert pays != lost, (local, n, bandwidth, method, text)
    assert n_lost > 2


def test_predict_plot_says_what_to_install(capsys, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert cli.main(["predict", "--plot", str(tmp_path / "p.png")]) == 2
    assert capsys.readouterr() == ("", "horovod-aps predict: --plot needs matplotlib: pip install matplotlib\n")


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"horovod-aps {horovod_aps.__version__}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("predict --backward-ms -5", "--backward-ms: milliseconds must be a number that is not negative, got '-5'"),
        ("predict --forward-ms nan", "--forward-ms: milliseconds must be"),
        ("predict --latency 5", "--latency: time must have a unit, as 50us, 5ms or 0.1s, got '5'"),
        ("predict --ranks 0", "--ranks: must be a whole number of at least 1, got '0'"),
        ("doctor --timeout -3", "--timeout: must be a positive number of seconds, got '-3'"),
        ("doctor --timeout nan", "--timeout: must be a positive number of seconds, got 'nan'"),
        ("doctor --timeout 0", "--timeout: must be a positive number of seconds, got '0'"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments.split())
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_predict_of_one_rank_is_free(capsys):
    assert cli.main(["predict", "--ranks", "1", "2"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|     1 |" in line]
    assert [row[4].strip() for row in rows[:3]] == ["0.0"] * 3 and [row[5].strip() for row in rows[:3]] == ["1.00x"] * 3


def test_predict_bandwidth_is_nominal_after_calibration(capsys, tmp_path):
    """A calibrated rate is payload, one given by hand is not: frame headers take their share of it again."""
    path, out = tmp_path / "c.json", tmp_path / "p.json"
    perfmodel.save_calibration(path, Calibration(Network(bandwidth=5e6, efficiency=1.0, host_rate=1e9), Machine()), {})
    common = ["predict", "--ranks", "2", "--calibration", str(path), "--backward-ms", "50"]
    assert cli.main([*common, "--bandwidth", "1gbit", "--json", str(out)]) == 0
    sizes = shapes.layer_sizes("resnet50")
    link = Network(bandwidth=1.25e8, host_rate=1e9)
    expected = perfmodel.predict_ring(sizes, 2, link, Machine(), backward=0.05).total
    assert json.loads(out.read_text())["predictions"][0]["total_s"] == pytest.approx(expected)
    # The break-even table knows of backward and of the network stack's rate, too.
    ranges = perfmodel.paying_bandwidths(sizes, 2, link, Machine(), backward=0.05, also=[1.25e8])
    assert predict.show_ranges(ranges) in capsys.readouterr().out.split("APS is faster")[1]
    assert cli.main([*common, "--json", str(out)]) == 0  # without --bandwidth, as calibrated
    expected = perfmodel.predict_ring(sizes, 2, replace(link, bandwidth=5e6, efficiency=1), Machine(), backward=0.05)
    assert json.loads(out.read_text())["predictions"][0]["total_s"] == pytest.approx(expected.total)


def test_predict_takes_users_model_and_calibration(capsys, tmp_path, monkeypatch):
    (tmp_path / "mymodel.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(10, 3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "c.json"
    perfmodel.save_calibration(path, Calibration(Network(bandwidth=5e6, latency=0.5), Machine()), {})
    assert cli.main(["predict", "--model", "mymodel:build", "--ranks", "2", "--calibration", str(path)]) == 0
    text = capsys.readouterr().out
    assert "mymodel:build: 2 layers, 0.00 M parameters" in text
    expected = perfmodel.predict_ring([30, 3], 2, Network(bandwidth=5e6, latency=0.5), Machine()).total
    assert expected > 1 and f"{1e3 * expected:.1f}" in text  # the latency of 0.5 s was used


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model", "resnet51"], "--model must be one of alexnet, vgg16"),
        (["--calibration", "/does/not/exist.json"], "No such file"),
        (["--model", "nosuchmodule:build"], "--model must be module:name that can be imported, got 'nosuch"),
        (["--model", "torch:nosuchfunction"], "--model must be module:name that can be imported"),
        (["--json", "/does/not/exist/p.json"], "No such file"),
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
        "decode")}}, "loops": {"copy": 4 * n / 4e9, "add": 4 * n / 4e9, "add16": 1.0, "casts": 8 * n / 5e9},
    }  # fmt: skip
    found = calibrate.derive(measured, n_ranks, 1, math.inf)
    got = found.machine
    assert found.network.bandwidth == pytest.approx(1e8) and found.network.latency == pytest.approx(1e-4)
    assert set(found.unmeasured) == {"intra_bandwidth", "intra_latency"} and found.notes == {}
    for name in (
        "copy_rate",
        "add_rate",
        "add16_rate",
        "cast_rate",
        "tensor_overhead",
        "layer_overhead",
        "cycle_time",
        "overlap",
    ):
        assert getattr(got, name) == pytest.approx(getattr(machine, name), rel=0.05), name
    assert got.kernels["4,3"] == rates

    # Noise: less time with more work. A loop's rate stands in where there is one; nothing is made up.
    sync = measured["synchronise"]
    sync["fp32 many"] = sync["fp32 flat"] = sync["fp32 small"]
    found = calibrate.derive(measured, n_ranks, 1, math.inf)
    assert set(found.notes) >= {"copy_rate", "add_rate"} and found.machine.copy_rate == pytest.approx(4e9)
    measured["loops"] |= {"copy": 0.0, "add": 1e9}
    measured["links"]["large"] = 0.0
    sync["fp32 tiny"] = 0.0
    found = calibrate.derive(measured, n_ranks, 1, math.inf)
    assert {"copy_rate", "add_rate", "bandwidth", "tensor_overhead"} <= set(found.unmeasured)


@pytest.mark.parametrize("ranks, local", [(2, 2), (4, 2)])
def test_calibrate_knows_what_it_did_not_measure(ranks, local, tmp_path, capsys):
    """On one host the links between hosts are unknown: null in the file, and refused unless they are given."""
    n = 64_000_000
    kernels = {name: 0.1 for name in ("scan", "encode", "reduce", "decode")}
    times = {"small": 1e-5, "large": 1e-2, "local small": 2e-6, "local large": 1e-3, "bytes": 10**6}
    measured = {
        "elements": n, "tensors": 64, "format": "4,3", "bucket_bytes": n, "allreduce": "ring", "links": times,
        "synchronise": {"fp32 small": 2e-3, "fp32 tiny": 6e-3, "fp32 flat": 2.0, "fp32 many": 2.2, "fp16 flat": 1.5,
                        "aps tiny": 4e-3, "aps many": 0.9},
        "kernels": {"4,3": kernels}, "loops": {"copy": 0.05, "add": 0.06, "add16": 0.07, "casts": 0.1},
    }  # fmt: skip
    found = calibrate.derive(measured, ranks, local, math.inf)
    path = tmp_path / "c.json"
    perfmodel.save_calibration(path, found, measured)
    calibrate.print_parameters(found)
    shown, values = capsys.readouterr().out, json.loads(path.read_text())["network"]
    if ranks == local:
        assert set(found.unmeasured) == {"bandwidth", "latency"} and values["bandwidth"] is values["latency"] is None
        assert re.search(r"link between hosts \| +not measured", shown) and "all ranks were on one host" in shown
        assert values["intra_bandwidth"] == pytest.approx(1e6 / 9.99e-3)
        assert cli.main(["predict", "--calibration", str(path), "--ranks", "2"]) == 0
        capsys.readouterr()
        assert cli.main(["predict", "--calibration", str(path), "--ranks", "2", "4"]) == 2
        assert capsys.readouterr().err == (
            f"horovod-aps predict: {path} did not measure bandwidth (all ranks were on one host); latency (all ranks "
            f"were on one host); give --bandwidth and --latency, or take defaults by --assume-defaults\n"
        )
        given = ["--bandwidth", "1gbit", "--latency", "5us"]
        for more in (given, ["--assume-defaults"]):
            assert cli.main(["predict", "--calibration", str(path), "--ranks", "4", *more]) == 0
    else:
        assert found.unmeasured == {}
        assert values["bandwidth"] == pytest.approx(4e6 / 9.99e-3)
        assert values["intra_bandwidth"] == pytest.approx(1e6 / 0.998e-3) and values["intra_latency"] == 2e-6


def test_predict_refuses_a_calibration_that_cannot_be(tmp_path, capsys):
    path = tmp_path / "c.json"
    machines = (Machine(copy_rate=1e12), Machine(add_rate=1e6), Machine(kernels={"4,3": KernelRates(scan=1e13)}))
    networks = (Network(intra_bandwidth=4e6), Network(bandwidth=1e13))
    for found in [Calibration(Network(), one) for one in machines] + [Calibration(one, Machine()) for one in networks]:
        perfmodel.save_calibration(path, found, {})
        assert cli.main(["predict", "--calibration", str(path)]) == 2
        assert "which is no measurement; calibrate again" in capsys.readouterr().err


def test_calibrate_shows_progress_only_now_and_then_in_a_log(capsys):
    progress = calibrate.Progress(100, True)
    for k in range(100):
        progress(f"part {k}")
    assert capsys.readouterr().err == "calibrate: 1 of 100, part 0\n"
    calibrate.Progress(3, False)("part")
    assert capsys.readouterr().err == ""


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
    found = perfmodel.load_calibration(out)
    assert found.network.ranks_per_host == 2 and found.machine.calibrated_ranks == 2
    assert 0 <= found.machine.overlap <= 1 and {"bandwidth", "latency"} <= set(found.unmeasured)
    assert set(found.machine.kernels) == {"4,3"} and "written:" in done.stdout
    assert re.match(r"calibrate: 1 of 18, network stack\n", done.stderr), done.stderr
    shown = [line for line in done.stdout.splitlines() if "GB/s" in line and "network stack" not in line]
    rates = [float(text) for line in shown for text in re.findall(r"\d[\d.e+-]*", line.split("|")[2])]
    assert rates and all(0.05 <= rate <= 200 for rate in rates), done.stdout
    more = ["--assume-defaults"] if set(found.unmeasured) > {"bandwidth", "latency"} else []
    assert cli.main(["predict", "--calibration", str(out), "--model", "mobilenet_v2", "--ranks", "2", *more]) == 0


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
