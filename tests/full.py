"""Tests too long for every run: `GLM5_FULL=1 make test`."""

from __future__ import annotations

import os

import pytest

full = pytest.mark.skipif("GLM5_FULL" not in os.environ, reason="only with GLM5_FULL=1: too long for every run")
