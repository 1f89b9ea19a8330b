"""Documents: a workflow that reads many pages at a time, and joins what it found into one report.

Run it with `python -m examples.documents`. README.md in this folder says what to read first.
"""
