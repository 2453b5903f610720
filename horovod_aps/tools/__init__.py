"""Around the engine, never in its way: the command, and what it can predict, measure, check and show.

Nothing here imports Horovod or a framework until a command needs it.
"""
