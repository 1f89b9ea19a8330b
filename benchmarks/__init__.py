"""Measures Fencepost on this machine: `python -m benchmarks throughput`. README.md tells what and how."""
