"""Lines of Sluice's own loggers, actors' included, on the page of the run that they belong to."""

import logging

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler


class RunLogHandler(APILogHandler):
    """Prefect's handler, for lines that belong to a run: others, such as a thread's, stay here."""

    def emit(self, record: logging.LogRecord) -> None:
        """Send a line to the API if a flow or task runs."""
        if FlowRunContext.get() is not None or TaskRunContext.get() is not None:
            super().emit(record)


def logs_to_prefect() -> None:
    """From now on Prefect shows what is logged while a flow or task runs. Calling again is fine."""
    logger = logging.getLogger("sluice")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, RunLogHandler) for handler in logger.handlers):
        logger.addHandler(RunLogHandler())
