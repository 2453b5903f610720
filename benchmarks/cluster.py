"""Hosts with slow links on one machine, by hand; they live in horovod_aps.bench.cluster.

python benchmarks/cluster.py --hosts 2 --rate 1gbit -- python script.py
"""

import sys

from horovod_aps.bench.cluster import (
    Cluster,
    ClusterError,
    ClusterTimeout,
    interface_bytes,
    main,
    missing,
    rate_in_bits,
)
from horovod_aps.bench.netns import STATE, sweep

__all__ = [
    "STATE",
    "Cluster",
    "ClusterError",
    "ClusterTimeout",
    "interface_bytes",
    "missing",
    "rate_in_bits",
    "sweep",
]

if __name__ == "__main__":
    sys.exit(main())
