"""DDP and FSDP2 under every launcher: the files of tests/parallel that need no Horovod, restarts, and ranks that die.

Oracle of restarts: a run of the same worker that nobody has interrupted, bit for bit.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_parallel import ENVIRONMENT, HOROVODRUN, ROOT, launch, run

from horovod_aps.bench.ports import free_port

WORKER = ROOT / "tests" / "workers" / "ddp_worker.py"
FILES = ("test_ddp.py", "test_ddp_hooks.py", "test_ddp_operations.py", "test_fsdp.py")
SMALL, MOBILE = "--backend ddp --synthetic --max-steps 2 --batch-size 2", "lraspp_mobilenet_v3_large"
THREE_RANKS = "simulation or 200 or groups or join or unused or options or shard or operations"
TORCHRUN = [str(HOROVODRUN.with_name("torchrun")), "--nproc-per-node", "2"]


def test_torchrun(tmp_path):
    launch("torchrun", 2, FILES, tmp_path)


def test_torchrun_three_ranks(tmp_path):
    """What depends on the number of ranks."""
    launch("torchrun", 3, FILES, tmp_path, keyword=THREE_RANKS)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ddp_and_horovod_under_mpirun(n_ranks, tmp_path):
    launch("mpirun", n_ranks, ["test_ddp_and_horovod.py"], tmp_path, env={"MASTER_PORT": str(free_port())})


def test_a_restart_of_torchrun_goes_on_where_the_killed_run_was(tmp_path):
    whole, killed, spawned = (tmp_path / name for name in ("whole", "killed", "spawned"))
    for folder in (whole, killed, spawned):
        folder.mkdir()
    commands = {
        spawned: [sys.executable, str(WORKER), str(spawned), "--spawn", "2"],
        whole: [*TORCHRUN, str(WORKER), str(whole)],
        killed: [*TORCHRUN, "--standalone", "--max-restarts", "1", str(WORKER), str(killed), "--kill-rank", "1"],
    }
    # Without it PyTorch's own Gloo now and then fails or hangs in the restarted ranks, with plain DDP too.
    separate = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for folder, command in commands.items():
        code, output = run(command, 120, separate)
        assert code == 0, output[-5000:]
        assert (folder / "weights0").read_bytes() == (folder / "weights1").read_bytes()
    assert "SIGKILL" in output or "exitcode: -9" in output, output[-3000:]  # it was killed
    assert (killed / "weights0").read_bytes() == (whole / "weights0").read_bytes()
    assert (spawned / "weights0").read_bytes() == (whole / "weights0").read_bytes()


def test_two_levels(tmp_path):
    """Two hosts with two ranks each: the ranks of a host add up first, in shared memory or, as on GPUs, by messages."""
    weights = set()
    for name, flags, way in (
        ("memory", [], r"two-level \("),
        ("operations", ["--operations"], r"two-level by messages .*?by torch.distributed's operations"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        command = [TORCHRUN[0], "--nproc-per-node", "4", str(WORKER), str(folder), "--hosts", "2", *flags]
        code, output = run(command, 120, {})
        assert code == 0, output[-5000:]
        assert len(re.findall(rf"rank \d: {way}", output)) == 4, output[-3000:]
        weights |= {(folder / f"weights{rank}").read_bytes() for rank in range(4)}
    assert len(weights) == 1


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_survivors_of_a_killed_rank_end_with_an_error(n_ranks, tmp_path):
    """Without a launcher, which would end them itself."""
    port = str(free_port())
    ranks = []
    for rank in range(n_ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(n_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(WORKER), str(tmp_path), "--kill-rank", "1"],
                env={**os.environ, **ENVIRONMENT, **place},
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        assert ranks[1].wait(120) == -signal.SIGKILL
        for rank in (0, *range(2, n_ranks)):
            output, _ = ranks[rank].communicate(timeout=30)
            assert ranks[rank].returncode not in (0, None), output
            assert "rank 1 has" in output or "to rank 1 has ended" in output, output[-3000:]
    finally:
        for one in ranks:
            one.kill()
            one.wait()


@pytest.mark.parametrize(
    "script, wanted",
    [
        ("ddp_digits.py --max-steps 60 --aps-allreduce", r"60: test accuracy [5-9]\d.* on all 360 .*\n.* 0\.25\d of"),
        ("ddp_digits.py --max-steps 3 --synthetic --fp16-allreduce", r"step 3: test accuracy"),
        (
            f"pytorch_imagenet_resnet50.py {SMALL} --model resnet18 --image-size 32 --aps-allreduce",
            r"step 2, .*\n.* 0\.25\d of",
        ),
        (f"pytorch_segmentation_fcn.py {SMALL} --model {MOBILE} --crop 64 64 --fp16-allreduce", r"step 2, .* mean IoU"),
        ("ddp_lightning.py", r"rank [01]: error \d\.\d+e-(0[3-9]|1\d), bytes 0\.25\d of"),
        ("ddp_accelerate.py", r"rank [01]: error \d\.\d+e-(0[3-9]|1\d), bytes 0\.25\d of"),
        ("ddp_ray.py", r"rank [01]: error \d\.\d+e-(0[3-9]|1\d), bytes 0\.25\d of"),
    ],
)
def test_examples(script, wanted):
    name, *arguments = script.split()
    if name.startswith("ddp_") and name != "ddp_digits.py":
        pytest.importorskip(name.removeprefix("ddp_").removesuffix(".py").replace("lightning", "pytorch_lightning"))
    launcher = [sys.executable] if name == "ddp_ray.py" else TORCHRUN
    for _ in range(3 if "--fp16-allreduce" in arguments else 1):
        code, output = run([*launcher, str(ROOT / "examples" / "pytorch" / name), *arguments], 120, {})
        if "SIGABRT" not in output:
            break  # with PyTorch's own hook, which has nothing of ours in it, 1 run of 150 aborts at its end
    assert code == 0, output[:2500] + output[-2500:]
    assert re.search(wanted, output), output[-3000:]


def test_without_horovod_tensorflow_and_mpi():
    """Oracle: an interpreter that cannot import them."""
    text = (
        "import sys\n"
        "for name in ('horovod', 'tensorflow', 'mpi4py', 'cupy', 'psutil'):\n"
        "    sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(Path(WORKER).parent)!r})\n"
        "import runpy\n"
        f"sys.argv = [{str(WORKER)!r}, *sys.argv[1:]]\n"
        "import horovod_aps.fsdp\n"
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(text)
        code, output = run([*TORCHRUN, str(script), folder], 120, {"GLOO_SOCKET_IFNAME": "lo"})
        assert code == 0, output[-5000:]
        assert (Path(folder) / "weights0").read_bytes() == (Path(folder) / "weights1").read_bytes()
