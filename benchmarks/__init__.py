"""One script for each speed claim. `make bench` runs those that this machine supports. Each prints a table."""
