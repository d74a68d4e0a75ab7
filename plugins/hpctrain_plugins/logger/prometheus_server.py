"""The formats of Prometheus: an endpoint that it reads, and values for a Pushgateway."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from prometheus_client import CollectorRegistry, MetricsHandler, push_to_gateway
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hpctrain.api import LogWriter, replacing
from hpctrain_plugins.logger.periodic import Service
from hpctrain_plugins.logger.series import KIND, Series

LOG = logging.getLogger("hpctrain")
_EVERYWHERE = ("0.0.0.0", "::")
# how long a reader, or a Pushgateway, may stay silent
_REQUEST_SECONDS = 10.0
# how often the server looks whether the run has ended
_POLL_SECONDS = 0.1


class Families(Collector):
    """The series as Prometheus' client library asks for them: `hpctrain_loss{run="gpt"} 2.5`."""

    def __init__(self, series: Series, labels: Mapping[str, str]) -> None:
        self._series, self._labels = series, labels

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, kinds in self._series.gauges.items():
            several = any(kinds)  # a number that stands alone has no kind
            gauge = GaugeMetricFamily(
                f"hpctrain_{name}", f"The newest {name} of the run.", labels=[*names, KIND] if several else names
            )
            for kind, value in kinds.items():
                gauge.add_metric([*values, kind] if several else values, value)
            yield gauge
        for name, total in self._series.totals.items():
            counter = CounterMetricFamily(
                f"hpctrain_{name}", f"The {name} that this process has trained.", labels=names
            )
            counter.add_metric(values, total)
            yield counter


def registry(series: Series, labels: Mapping[str, str]) -> CollectorRegistry:
    """A registry of this run alone: another run in the process has its own."""
    made = CollectorRegistry()
    made.register(Families(series, labels))
    return made


class Endpoint(LogWriter):
    """A server in threads. A file tells its address, in the format of Prometheus' `file_sd_configs`, while it serves."""

    def __init__(self, host: str, port: int, series: Series, labels: Mapping[str, str], address_file: Path) -> None:
        """Raises OSError if nothing can listen there."""
        self._series, self._address_file = series, address_file
        self._server = _Server(host, port, registry(series, labels))
        try:
            self._tell(host)
        except OSError:
            self._server.server_close()
            raise
        poll = {"poll_interval": _POLL_SECONDS}
        threading.Thread(target=self._server.serve_forever, kwargs=poll, name="prometheus", daemon=True).start()

    def log(self, row: Mapping[str, Any]) -> None:
        self._series.take(row)

    def close(self) -> None:
        self._address_file.unlink(missing_ok=True)  # another program may get the port
        self._server.shutdown()
        self._server.stop_listening()

    def _tell(self, host: str) -> None:
        name = socket.gethostname() if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
        target = f"{name}:{self._server.server_address[1]}"
        with replacing(self._address_file) as file:
            file.write(f"{json.dumps([{'targets': [target], 'labels': {}}])}\n".encode())
        LOG.info("prometheus: http://%s/metrics", target)


class _Server(ThreadingMixIn, TCPServer):
    """Answers each request in a thread, and says nothing on the screen.

    (`prometheus_client.start_http_server` asks the DNS for this host's name, and prints readers' errors with a traceback.)
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, values: CollectorRegistry) -> None:
        class Handler(MetricsHandler):
            registry = values
            timeout = _REQUEST_SECONDS

        found: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family, address = found[0], found[4]
        super().__init__(address, Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        LOG.info("prometheus: a request of %s failed", client_address, exc_info=True)

    def stop_listening(self) -> None:
        """Give the port back, though workers that were forked meanwhile have the socket, too."""
        with suppress(OSError):  # not every system takes this of a socket that listens
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()


class Gateway(Service):
    """A Pushgateway. The values of a run replace those that it has sent before, also of its earlier jobs."""

    def __init__(self, address: str, series: Series, labels: Mapping[str, str], output_dir: Path) -> None:
        self._address, self._registry = address, registry(series, labels)
        self._group = {"run": labels["run"], "instance": str(output_dir.absolute())}

    def send(self) -> None:
        push_to_gateway(self._address, "hpctrain", self._registry, grouping_key=self._group, timeout=_REQUEST_SECONDS)
