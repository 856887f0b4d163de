"""An MCP server for tests: ``echo_mcp_server.py`` by stdio, ``echo_mcp_server.py PORT`` by HTTP."""

from __future__ import annotations

import os
import sys
import time

import anyio
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("echo")
calls = 0


@server.tool()
def echo(text: str) -> str:
    """Say it again."""
    return text


@server.tool(structured_output=True)
def add(a: int, b: int = 1) -> dict[str, int]:
    return {"sum": a + b}


@server.tool()
def refuse() -> str:
    """Always fails."""
    raise ValueError("not today")


@server.tool()
def picture() -> Image:
    """A picture and nothing else."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
def count_calls() -> int:
    """How often this process was asked."""
    global calls
    calls += 1
    return calls


@server.tool()
def process_id() -> int:
    """Which process this is."""
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    """An environment variable of this process."""
    return os.environ.get(name, "unset")


@server.tool()
async def stall(seconds: float) -> str:
    """Sleeps without letting anybody else work: it would not even notice that its input has ended."""
    time.sleep(seconds)
    return "awake"


@server.tool()
async def wait(seconds: float) -> str:
    """Sleeps while others work."""
    await anyio.sleep(seconds)
    return "awake"


@server.tool()
def crash() -> str:
    """Ends this process with a word on stderr."""
    sys.stderr.write("the echo dies away\n")
    sys.stderr.flush()
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
