"""The gRPC edge: validate, convert, map errors. No decision, no SQL."""
