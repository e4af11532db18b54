"""Every speed claim is a command here. `make bench` runs all that this machine can; each prints a table of ratios."""
