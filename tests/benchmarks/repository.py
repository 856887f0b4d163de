"""Importing this lets a program in this folder, and the Ray workers that it starts, import Troupe."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

os.chdir(ROOT)  # Ray's workers look for modules where their driver stands
sys.path.insert(0, str(ROOT))
