"""The soak: real processes under load, with a fault every few seconds, and a checker afterwards that nothing forgives.

`python -m tests.faults.soak` runs it; docs/reliability.md says what it holds.
"""
