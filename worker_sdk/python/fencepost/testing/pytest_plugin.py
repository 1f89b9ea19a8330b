"""The fixture `fencepost_env`, for projects that name their plugins. Installed, it is there by itself."""

from __future__ import annotations

from fencepost_pytest import fencepost_env

__all__ = ["fencepost_env"]
