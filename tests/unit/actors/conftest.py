"""The servers with an agent on which the tests of served agents play."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from policies.tiny import build_tokenizer

if TYPE_CHECKING:
    from agent_server import AgentServer

# The helpers are imported inside: they load Ray Serve, which few files of this folder need.


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer([[{"role": "user", "content": "What is 12+34?"}]]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def open_server(tokenizer_folder: Path) -> Iterator[AgentServer]:
    from agent_server import agent_server

    with agent_server(tokenizer_folder) as server:
        yield server


@pytest.fixture(scope="module")
def keyed_server(tokenizer_folder: Path) -> Iterator[AgentServer]:
    from agent_server import KEYS, agent_server

    with agent_server(tokenizer_folder, KEYS) as server:
        yield server


@pytest.fixture
def server(open_server: AgentServer) -> AgentServer:
    """A server without keys, idle at the beginning of the test."""
    open_server.service.reset()
    return open_server


@pytest.fixture
def locked(tokenizer_folder: Path) -> Iterator[AgentServer]:
    """A fresh server that wants a key."""
    from agent_server import KEYS, agent_server

    with agent_server(tokenizer_folder, KEYS) as server:
        yield server
