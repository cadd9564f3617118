"""Tests not seen to pass in their last version yet, or too long for every run: `GLM5_FULL=1 make test`."""

from __future__ import annotations

import os

import pytest

full = pytest.mark.skipif("GLM5_FULL" not in os.environ, reason="only with GLM5_FULL=1: not proven or too long yet")
