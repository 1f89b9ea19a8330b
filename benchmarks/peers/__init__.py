"""Other systems for durable work, on the same job as Fencepost: the benchmark `peers`."""
