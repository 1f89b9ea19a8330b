"""Servers for tests, in the test's process: each with a database of its own, and time that skips.

`fencepost.testing` of the SDK is what people use; this is its half of the server. Production never imports it.
"""
