"""One script for every speed claim. `make bench` runs those that this machine supports; each prints a table of ratios."""
