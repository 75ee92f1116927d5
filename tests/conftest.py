"""Puts this folder on sys.path, so that tests of any folder can import s3_servers and its like."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
