"""Serves the newest values to Prometheus, or sends them to its Pushgateway."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from hpctrain.api import (
    EXIT_ENVIRONMENT,
    EnvironmentUnfitError,
    Field,
    Logger,
    LogWriter,
    Options,
    Plan,
    Problem,
    hookimpl,
    reason,
)
from hpctrain_plugins.logger.addresses import address_problems
from hpctrain_plugins.logger.periodic import Periodic
from hpctrain_plugins.logger.series import Series, run_labels

# the time between two pushes: Prometheus reads about as often
_PUSH_SECONDS = 15.0


class PrometheusOptions(Options):
    port: int = Field(default=0, ge=0, le=65535, description="port of the endpoint (default: any free one)")
    host: str = Field(
        default="0.0.0.0",
        min_length=1,
        description='address of the endpoint; "127.0.0.1" can be read on this node only (default: all addresses)',
    )
    pushgateway: str | None = Field(
        default=None,
        description='a Pushgateway to send the values to, such as "http://gateway.site:9091"; nothing listens then',
    )


class Prometheus(Logger):
    """Prometheus: an endpoint on rank 0's node, whose address is in output_dir/prometheus.json; or a Pushgateway."""

    name = "prometheus"
    Options = PrometheusOptions
    options: PrometheusOptions

    def problems(self, plan: Plan) -> list[Problem]:
        found, gateway = [], self.options.pushgateway
        if importlib.util.find_spec("prometheus_client") is None:
            why = "the package prometheus_client is not installed; pip install 'hpctrain[prometheus]', or leave this logger out"
            found.append(Problem(why, exit_code=EXIT_ENVIRONMENT))
        if gateway is not None:
            found += address_problems("pushgateway", gateway, "a Pushgateway that asks for none")
            if self.options.model_fields_set & {"port", "host"}:
                found.append(
                    Problem(
                        "pushgateway sends the values and nothing listens; found port or host as well, leave one out"
                    )
                )
        return found

    def open(self, output_dir: Path, resumed_step: int) -> LogWriter:
        """Raises EnvironmentUnfitError if the port can't be had."""
        from hpctrain_plugins.logger.prometheus_server import Endpoint, Gateway  # here: it needs the extra

        series, labels = Series(), run_labels(output_dir)
        if self.options.pushgateway is not None:
            gateway = Gateway(self.options.pushgateway, series, labels, output_dir)
            return Periodic(self.name, series, gateway, _PUSH_SECONDS)
        host, port = self.options.host, self.options.port
        try:
            return Endpoint(host, port, series, labels, output_dir / "prometheus.json")
        except OSError as error:
            raise EnvironmentUnfitError(
                f"[[logger]] name = 'prometheus': port {port} of {host} can't be had ({reason(error)}); expected a port that "
                "nobody uses and an address of this node; leave port out for any free port"
            ) from error


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [Prometheus]
