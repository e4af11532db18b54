"""`python -m sandmask` is the `sandmask` command."""

from sandmask.cli import main

if __name__ == "__main__":
    main()
