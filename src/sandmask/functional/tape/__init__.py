"""Moments over environments of every weight's gradient from one forward and one backward pass of K runs.

`moment_tape` has the tape; every other file computes one kind of layer while a tape is active.
"""
