"""Ways to move bytes between ranks: `base` says what the engine asks of one, each other module is one."""
