"""The contract in Python: the messages and gRPC stubs that `make gen` makes from proto/fencepost/v1.

Nothing here is written by hand. The .proto files are the reference: each field says what it means, its unit,
range and default, and who sets it.
"""
