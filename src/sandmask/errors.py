"""The one exception type for mistakes that a user can mend."""


class SandmaskError(Exception):
    """Something the user can fix: the message says what was wrong, where, and what to do.

    The command line prints it as one line and exits with status 2; in Python it is an ordinary exception.
    """
