"""Ports and networks that a machine is asked for."""

from __future__ import annotations

import socket

import pytest

from recovery.network import _default_routes, interface_address, usual_names
from recovery.ports import PORTS, can_bind, free_port


def test_attempts_in_a_row_get_different_ports_below_the_kernels_own() -> None:
    found = [free_port("127.0.0.1", start=start, bind=lambda host, port: True) for start in range(200)]
    assert len(set(found)) == 200
    assert all(PORTS[0] <= port <= PORTS[1] for port in found)


def test_what_is_taken_is_passed_over_and_no_port_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert not can_bind("127.0.0.1", port)
        assert free_port("127.0.0.1", (port, port), start=0) == port  # the only one that is allowed: taken as it is
        with pytest.raises(OSError, match=f"no port of {port - 1} to {port} is free on 127.0.0.1"):
            free_port("127.0.0.1", (port - 1, port), start=3, bind=lambda host, port: False)
    tried: list[int] = []
    assert free_port("h", (10, 13), start=2, bind=lambda host, port: tried.append(port) or len(tried) == 3) in range(10, 14)  # type: ignore[func-returns-value]
    assert len(set(tried)) == 3


def test_the_way_out_of_this_machine_comes_first_and_loopback_last() -> None:
    table = (
        "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
        "ib0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
        "wlan0\t00000000\t010200C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    )
    assert _default_routes(table) == ["eth0", "wlan0"]
    assert _default_routes(table.splitlines()[0]) == []
    names = usual_names()
    assert names[-1] == "lo"
    assert interface_address(names)[0] in names
