"""The fixtures of made_up_runs.py. What a test imports is not taken from here: every folder has a `conftest`, and one of them would win."""

from made_up_runs import complete_run, failed_run, stopped_run

__all__ = ["complete_run", "failed_run", "stopped_run"]
