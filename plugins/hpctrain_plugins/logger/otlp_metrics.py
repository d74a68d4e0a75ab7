"""Sends the newest values to a collector of OpenTelemetry, over OTLP and HTTP."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.api import (
    EXIT_ENVIRONMENT,
    EnvironmentUnfitError,
    Field,
    Logger,
    Options,
    Plan,
    Problem,
    hookimpl,
    reason,
)
from hpctrain_plugins.logger.addresses import address_problems
from hpctrain_plugins.logger.periodic import Periodic, Service
from hpctrain_plugins.logger.series import KIND, Series, run_labels

LOG = logging.getLogger("hpctrain")
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_PATH = "/v1/metrics"
# the time between two exports, if OTEL_METRIC_EXPORT_INTERVAL says no other
_SECONDS = 15.0
_UNITS = {"_seconds": "s", "_bytes": "By"}


class OpenTelemetryOptions(Options):
    endpoint: str | None = Field(
        default=None,
        description='the collector, such as "http://collector.site:4318" (default: $OTEL_EXPORTER_OTLP_ENDPOINT, else '
        "port 4318 of this node)",
    )


class OpenTelemetry(Logger):
    """OpenTelemetry: metrics for a collector, over OTLP and HTTP."""

    name = "opentelemetry"
    Options = OpenTelemetryOptions
    options: OpenTelemetryOptions

    def problems(self, plan: Plan) -> list[Problem]:
        found, endpoint = [], self.options.endpoint
        if not all(_is_installed(package) for package in _PACKAGES):
            why = (
                "the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http are not both installed; "
                "pip install 'hpctrain[opentelemetry]', or leave this logger out"
            )
            found.append(Problem(why, exit_code=EXIT_ENVIRONMENT))
        if endpoint is not None:
            found += address_problems("endpoint", endpoint, "OTEL_EXPORTER_OTLP_HEADERS")
        return found

    def open(self, output_dir: Path, resumed_step: int) -> Periodic:
        """Raises EnvironmentUnfitError for a variable that the library can't read."""
        series, labels = Series(), run_labels(output_dir)
        try:
            collector = Collector(self.options.endpoint, series, labels, output_dir)
        except (OSError, ValueError) as error:
            raise EnvironmentUnfitError(
                f"[[logger]] name = 'opentelemetry': a variable OTEL_* of the environment can't be used: {reason(error)}"
            ) from error
        return Periodic(self.name, series, collector, _seconds(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")))


class Collector(Service):
    """A collector, for the series of one run. Reads OpenTelemetry's variables for headers, certificates and the like."""

    def __init__(self, endpoint: str | None, series: Series, labels: Mapping[str, str], output_dir: Path) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter  # here: it is an extra
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        self._said = _Said()
        logging.getLogger("opentelemetry").addHandler(self._said)
        self._said.begin()
        url = endpoint and endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        attributes = {"service.name": "hpctrain", "service.instance.id": str(output_dir.absolute())}
        attributes |= {f"hpctrain.{name}": value for name, value in labels.items()}
        resource = Resource.create({**attributes, **OTELResourceDetector().detect().attributes})  # the site's go first
        # without an interval it has no thread, which it would start in each forked worker, too
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(url), math.inf)
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("hpctrain")
        self._series = series
        self._known: set[str] = set()
        for text in self._said.texts:
            LOG.warning("logger opentelemetry: %s", text)

    def send(self) -> None:
        self._add_instruments()
        self._said.begin()
        self._provider.force_flush()
        self._said.raise_failure()

    def finish(self) -> None:
        self._provider.shutdown()
        logging.getLogger("opentelemetry").removeHandler(self._said)

    def _add_instruments(self) -> None:
        """Make an instrument for each series that is new; the values are asked for when they are sent."""
        for name in self._series.totals.keys() - self._known:
            self._meter.create_observable_counter(f"hpctrain.{name}", [partial(self._total, name)])
            self._known.add(name)
        for name in self._series.gauges.keys() - self._known:
            unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
            self._meter.create_observable_gauge(f"hpctrain.{name}", [partial(self._gauge, name)], unit)
            self._known.add(name)

    def _total(self, name: str, options: Any) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        yield Observation(self._series.totals[name])

    def _gauge(self, name: str, options: Any) -> Iterator[Any]:
        from opentelemetry.metrics import Observation

        for kind, value in self._series.gauges[name].items():
            if math.isfinite(value):  # OpenTelemetry has no others: its library would leave them out and warn
                yield Observation(value, {KIND: kind} if kind else None)


class _Said(logging.Handler):
    """Takes what the library logs, which would go to the screen: nothing else tells of a variable it can't read, or of a failed
    export."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = 0
        self.texts: list[str] = []
        self._failed = False

    def begin(self) -> None:
        """Begin anew, for what this thread sends."""
        self._thread, self._failed = threading.get_ident(), False
        self.texts.clear()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.texts.append(record.getMessage())
            self._failed |= record.levelno >= logging.ERROR

    def raise_failure(self) -> None:
        """Raise ConnectionError if an export failed since `begin`."""
        if self._failed:
            why = self.texts[0].removeprefix("Transient error ").partition(" encountered while exporting")[0]
            raise ConnectionError(why)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what it is in is missing
        return False


def _seconds(milliseconds: str) -> float:
    return int(milliseconds) / 1000 if milliseconds.isdigit() and int(milliseconds) else _SECONDS


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [OpenTelemetry]
