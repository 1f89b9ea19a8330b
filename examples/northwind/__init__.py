"""Northwind: 830 real orders go through a durable workflow while a worker is killed.

Run it with `make demo`. README.md in this folder says what to read first.
"""
