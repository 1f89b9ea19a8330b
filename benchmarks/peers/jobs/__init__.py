"""The job, once for each peer. Each runs in the peers' own environment and knows nothing of this package."""
