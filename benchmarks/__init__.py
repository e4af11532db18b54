"""One script per speed claim. `make bench` runs those that this machine supports; each prints a table of ratios."""
