"""A PostgreSQL for the tests that need one."""

import importlib.util
import os
import uuid

import pytest
from postgres_server import PostgresServer, binaries


def _missing() -> str | None:
    if binaries() is None:
        return "PostgreSQL is not installed (apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed (pip install 'titan-tune[postgres]')"
    return None


@pytest.fixture(scope="session")
def postgres_server():
    """Skips with the reason on a laptop without PostgreSQL; in CI that is a failure."""
    missing = _missing()
    if missing:
        required = os.environ.get("CI") or os.environ.get("TITAN_TUNE_REQUIRE_POSTGRES")
        (pytest.fail if required else pytest.skip)(missing)
    server = PostgresServer.create(binaries())
    try:
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def postgres_url(postgres_server):
    """A database of the test's own."""
    return postgres_server.new_database(f"t{uuid.uuid4().hex[:12]}")
