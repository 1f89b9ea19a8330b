"""HTTP for people and machines that watch: health and metrics."""
