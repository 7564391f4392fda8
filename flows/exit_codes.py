"""What the exit code of `sluice` says. Scripts rely on these numbers: none changes its meaning."""

DONE = 0
FAILED = 1
"""The run, or the check, failed."""
BAD_INPUT = 2
"""A setting, a file or a name is wrong; nothing was started."""
INTERRUPTED = 3
"""Stopped by a signal; `sluice resume` goes on."""
CRASHED = 4
"""`sluice wait`: the run's driver is gone without a word."""
CANCELLED = 5
"""`sluice wait`: the run was cancelled."""
TIMEOUT = 6
"""`sluice wait`: the run was still going when the time was over."""
