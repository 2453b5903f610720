"""From gradients handed in to gradients reduced: batches, agreement between ranks, and what happens to a bucket."""
