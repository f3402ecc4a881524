"""Shared by all tests: where the helpers of tests/reference lie, and one clear message when MPI is missing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "reference"))
