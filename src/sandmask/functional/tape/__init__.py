"""Moments over environments of every weight's gradient, for K runs, from one forward and one backward pass.

`moment_tape` has the tape, and `layers` has the computation of each kind of layer while a tape is active.
"""

from sandmask.functional.tape.moment_tape import MomentTape

__all__ = ["MomentTape"]
