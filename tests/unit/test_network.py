"""Where the store listens, and where ranks look for it."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from hpctrain.base.store import network
from hpctrain.base.store.network import hosts_of, listeners, own_addresses, reachable_addresses


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes every host name stand for one address."""
    return lambda address: monkeypatch.setattr(network.socket, "gethostbyname", lambda _: address)


def test_a_name_of_this_host_s_that_others_know_is_its_one_address(named: Callable[[str], None]) -> None:
    mine = reachable_addresses()
    if not mine:
        pytest.skip("this machine has no address but loopback")
    named(mine[0])
    assert own_addresses("node1") == [mine[0]] and hosts_of("node1") == ["node1"]


def test_a_name_that_means_loopback_here_stands_for_the_host_s_addresses(named: Callable[[str], None]) -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name."""
    named("127.0.1.1")
    assert own_addresses("node1") == hosts_of("node1") == reachable_addresses("node1")
    assert not any(address.startswith(("127.", "fe80:")) for address in hosts_of("node1"))


def test_a_port_that_is_taken_on_one_address_is_not_used_on_the_other() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listeners(["127.0.0.1", "127.0.0.2"], port)
        with socket.create_server(("127.0.0.1", port)):
            pass  # it was given back
    made = listeners(["192.0.2.77", "127.0.0.1"])  # an address that is not this machine's is left out
    assert [one.getsockname()[0] for one in made] == ["127.0.0.1"]
    for one in made:
        one.close()
