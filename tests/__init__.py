"""The tests of Fencepost; tests/fixtures is imported as a package by them and by the processes that they start."""
