"""Measure gradient synchronisation for real: hosts with slow links on one machine, and ranks that take methods in turn.

Beside the flow of data; `benchmarks/sync.py` and `horovod-aps study` are made of it.

- `cases`: one case, from building the hosts to the numbers
- `cluster`, `netns`, `delayline`: the hosts
- `worker`: one rank; needs torch, as do `methods` and `works`
"""
