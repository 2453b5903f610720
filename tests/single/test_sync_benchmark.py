"""benchmarks/sync.py: its arithmetic against hand-computed numbers, and one real run over shared memory.

Oracles: figures worked out by hand for the table, Horovod's and DDP's own exactness in fp32 for the run.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


from horovod_aps.bench import cases  # noqa: E402
from horovod_aps.bench.methods import make_compression  # noqa: E402
from horovod_aps.bench.names import DEFAULT_METHODS, EXTRA_METHODS, bits_per_element, label  # noqa: E402
from horovod_aps.bench.works import GradientSource, digits_batches, work_shapes  # noqa: E402


def test_parse_link_splits_rate_and_delay() -> None:
    assert cases.parse_link("1gbit+5ms") == ("1gbit", 5.0)
    assert cases.parse_link("shm") == ("shm", 0.0)
    with pytest.raises(ValueError, match="looks like \"1gbit\\+5ms\", got '1gbit\\+5s'"):
        cases.parse_link("1gbit+5s")


def test_derive_gives_ratios_shares_and_model_bytes() -> None:
    def raw(seconds: list[float], sent: list[float]) -> dict[str, object]:
        return {"seconds": seconds, "bytes_by_rank": sent, "error": 0.0, "identical": True}

    result = {
        "n_elements": 1_000_000,
        "n_ranks": 4,
        "rate_bits": 1e8,
        "methods": {
            "horovod_fp32": raw([0.8, 1.0, 0.9], [6e6] * 4),
            "aps_4_3": raw([0.3, 0.2, 0.25], [1.5e6, 1.6e6, 1.4e6, 1.5e6]),
        },
    }
    cases.derive(result)
    aps = result["methods"]["aps_4_3"]  # type: ignore[index]
    assert aps["median"] == 0.25
    assert aps["over_horovod_fp32"] == pytest.approx(3.6)
    assert aps["over_horovod_fp16"] is None
    assert aps["bytes"] == pytest.approx(1.5e6)
    assert aps["wire_share"] == pytest.approx(1.6e6 * 8 / 1e8 / 0.25)
    assert aps["model_bytes"] == pytest.approx(1.5e6)  # 2 * 3/4 * one byte for each element


def test_method_names_have_labels_and_widths() -> None:
    names = DEFAULT_METHODS + EXTRA_METHODS
    assert [bits_per_element(name) for name in names] == [32, 16, 8, 8, 6, 4, 32, 16, None, None]
    assert label("aps_3_0") == "APS (3, 0)"
    assert label("packed:onebit+ef") == "onebit, error feedback"
    assert bits_per_element("packed:qsgd4") == 4 + 32 / 512 and bits_per_element("packed:mx-e4m3") == 8.25
    assert len({label(name) for name in names}) == len(names)
    with pytest.raises(ValueError, match="unknown method 'aps_4'"):
        make_compression("aps_4")


def test_gradient_source_refresh_restores_and_exact_mean_is_the_mean() -> None:
    shapes = work_shapes("small")
    sources = [GradientSource(shapes, rank) for rank in range(3)]
    before = [tensor.clone() for tensor in sources[1].tensors]
    for tensor in sources[1].tensors:
        tensor.zero_()
    sources[1].refresh()
    assert all((now == then).all() for now, then in zip(sources[1].tensors, before, strict=True))
    for k, mean in enumerate(sources[0].exact_mean(3)):
        total = sum(source.tensors[k].double() for source in sources)
        assert ((total / 3).flatten() - mean).abs().max() < 1e-15


def test_digits_shards_are_disjoint() -> None:
    first, second = (next(digits_batches(rank, 2))[0].flatten(1) for rank in range(2))
    assert not (first[:, None] == second[None]).all(-1).any()


@pytest.mark.slow
def test_sync_runs_all_kinds_of_methods_over_shared_memory(tmp_path: Path) -> None:
    methods = [
        "horovod_fp32",
        "horovod_fp16",
        "aps_4_3",
        "ddp_fp32",
        "ddp_fp16",
        "ddp_powersgd",
        "ddp_quant8",
    ]
    command = [sys.executable, str(BENCHMARKS / "sync.py"), "--works", "small", "step", "--links", "shm"]
    command += ["--budget", "0", "--min-rounds", "2", "--methods", *methods, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "sync.json").read_text())["results"]
    assert [result["case"]["work"] for result in results] == ["small", "step"]
    for result in results:
        found = result["methods"]
        assert list(found) == methods
        assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in found.values())
        assert all(one["identical"] for one in found.values())
        assert all(one["bytes"] is None for one in found.values())  # shared memory has no wire
        assert found["horovod_fp32"]["error"] < 1e-6 and found["ddp_fp32"]["error"] < 1e-6
        assert 1e-5 < found["horovod_fp16"]["error"] < 2e-3
        assert 2e-3 < found["aps_4_3"]["error"] < 0.1
    assert (tmp_path / "sync.png").stat().st_size > 10_000
    assert "| APS (4, 3) |" in (tmp_path / "sync.md").read_text()
