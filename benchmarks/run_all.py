"""`make bench`: the kernels' speed, then the default selection of synchronisation cases, within 15 minutes.

Arguments are passed on to sync.py. Without root, or without `ip` and `tc`, it says what is missing and runs
the shared-memory cases alone.
"""

import subprocess
import sys
from pathlib import Path

from horovod_aps.bench.netns import missing

HERE = Path(__file__).resolve().parent
OUT = Path("out/bench")


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    arguments = sys.argv[1:]
    if not arguments and (lacks := missing()):
        print(
            f"Hosts with slow links need {' and '.join(lacks)}; running over shared memory only.\n",
            flush=True,
        )
        arguments = ["--links", "shm", "--works", "resnet50", "mobilenet_v2", "small"]
    kernels = subprocess.run(
        [sys.executable, str(HERE / "kernels.py"), "--json", str(OUT / "kernels.json")], check=False
    )
    print(flush=True)
    sync = subprocess.run([sys.executable, str(HERE / "sync.py"), *arguments], check=False)
    return kernels.returncode or sync.returncode


if __name__ == "__main__":
    sys.exit(main())
