"""Worker streams: a state machine without I/O, and the stream around it."""
