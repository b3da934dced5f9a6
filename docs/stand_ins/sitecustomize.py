"""Imported by each Python that a tutorial starts (docs/conf.py): absent packages of public networks get stand-ins."""

import sys

from benchmarks.stand_ins import StandIns

sys.meta_path.append(StandIns())
