"""A resource server that NeMo-Gym ships, its example with a counter: ``outside_nemo_gym.py 8000``.

It runs in the environment of ``outside_nemo_gym.txt``, as NeMo-Gym's own command runs it but for Ray and its
head server, with which a resource server does not speak.
"""

from __future__ import annotations

import sys

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

if __name__ == "__main__":
    port = int(sys.argv[1])
    config = StatefulCounterResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="", name="counter")
    server = StatefulCounterResourcesServer(config=config, server_client=ServerClient.model_construct())
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
