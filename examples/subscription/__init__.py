"""Subscription: a workflow that runs for years, a month at a time, each month as a new run of one chain.

Run it with `python -m examples.subscription`. README.md in this folder says what to read first.
"""
