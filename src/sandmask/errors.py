"""The base class of user errors."""


class SandmaskError(Exception):
    """A user error; the message says what was wrong, where, and what to do.

    The command line prints it as one line and exits with status 2; in Python it is an ordinary exception.
    """
