"""How log records look: a line for people, or a JSON object for programs, both with trace ids.

What callers send and what the model answers is never logged; see docs/observability.md.
"""

from __future__ import annotations

import datetime
import json
import logging
from typing import TYPE_CHECKING

from opentelemetry import trace

if TYPE_CHECKING:
    from headwater.config import TelemetryConfig

_HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class HumanFormatter(logging.Formatter):
    """Time, severity, logger, message; the trace id when a traced request is at work."""

    def __init__(self) -> None:
        super().__init__(_HUMAN)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without traceback."""
        line = super().formatMessage(record)
        ids = _trace_ids()
        return f"{line} [trace {ids[0]}]" if ids else line


class JsonFormatter(logging.Formatter):
    """One object per line: time, severity, logger, message, service, and where known trace_id,
    span_id and exception.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": time.isoformat(timespec="milliseconds"),
            "severity": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "service": self._service,
        }
        if ids := _trace_ids():
            fields["trace_id"], fields["span_id"] = ids
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def configure_logging(service: str, config: TelemetryConfig) -> None:
    """Logs to standard error, a line per record."""
    handler = logging.StreamHandler()
    is_json = config.log_format == "json"
    handler.setFormatter(JsonFormatter(service) if is_json else HumanFormatter())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


def _trace_ids() -> tuple[str, str] | None:
    """Trace and span of the context that logs, in hex as W3C has them."""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id)
