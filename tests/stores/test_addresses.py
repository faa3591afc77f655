"""Addresses of servers as users give them."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from stallfree.errors import InputError, MissingExtraError
from stallfree.stores.addresses import Address


def test_an_address_as_users_give_it() -> None:
    given = {"host": "node1", "port": 7000, "password": "secret", "username": "me", "db": 3, "ssl_keyfile": None}
    address = Address.of(given)
    assert address == Address("node1", 7000, username="me", password="secret", db=3)
    assert Address.of({}) == Address("localhost", 6379)
    assert Address.of({"path": Path("/tmp/s")}).path == "/tmp/s"
    assert Address.of({"ssl": True, "ssl_ca_certs": "/ca.pem"}).ssl_ca_certs == "/ca.pem"
    assert [str(one) for one in (address, Address("::1"), Address(path="/s"))] == ["node1:7000", "[::1]:6379", "/s"]
    assert pickle.loads(pickle.dumps(address)) == address
    assert "secret" not in repr(address) + str(address)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("node1:6379", "str: give a dict"),
        ({"hots": "a"}, "'hots', which is unknown: use host, port"),
        ({"port": "6379"}, "port='6379': expected an integer"),
        ({"port": True}, "port=True: expected an integer"),
        ({"port": 0}, "port=0: expected 1 to 65535"),
        ({"host": ""}, "an empty host"),
        ({"db": -1}, "db=-1"),
        ({"ssl": 1}, "ssl=1: expected True or False"),
        ({"path": "/s", "port": 1}, "give one of them"),
        ({"path": "/s", "ssl": True}, "needs no TLS"),
        ({"username": "me"}, "no password"),
        ({"ssl_ca_certs": "/ca.pem"}, "ssl_ca_certs and without ssl=True"),
        ({"ssl": True, "ssl_keyfile": "/key.pem"}, "no ssl_certfile"),
        ({"password": 12345}, "password=something else: expected a text"),
        ({1: 2}, "1, which is unknown"),
    ],
)
def test_an_address_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Address.of(given)
    assert "12345" not in str(caught.value)


def test_without_the_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.backoff", None)
    for use in (Address().connection, Address().client):
        with pytest.raises(MissingExtraError, match=r"stallfree\[redis\]"):
            use(1.0)
