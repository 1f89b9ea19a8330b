"""Onboarding: a workflow of days that reminds, waits for an approval, and takes back what it has done.

Run it with `python -m examples.onboarding`. README.md in this folder says what to read first.
"""
