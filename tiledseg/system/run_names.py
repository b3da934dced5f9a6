"""What lies in a run's folder, by its name."""

CHECKPOINTS, VALIDATION, EVENTS = "checkpoints", "validation", "events"
"""Folders."""
CONFIG, METRICS, STARTED, SUMMARY, PROGRESS, PAGE = (
    "config.yaml",
    "metrics.jsonl",
    "started.json",
    "summary.json",
    "progress.png",
    "report.html",
)
"""Files."""
FOLDERS = CHECKPOINTS, VALIDATION, EVENTS
FILES = CONFIG, METRICS, STARTED, SUMMARY, PROGRESS, PAGE, "run.lock"
