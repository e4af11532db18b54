"""What `sandmask demo` shows while it trains."""

from sandmask.api._sweep_progress import SweepDisplay, headline

__all__ = ["SweepDisplay", "headline"]
