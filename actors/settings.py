"""Settings of the fleet and the server: plain dataclasses, importable without Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from environments.bounds import setting
from policies.settings import EngineConfig

ACTORS_PER_CORE = 8
"""Rollout actors for which a CPU core has the time: in a first wave, and in a run that sets no number."""
MANY_CALLS = 100_000
"""Calls that an actor or a replica of Serve takes at the same time. Some wait for minutes: with Ray's
defaults, 1,000 for an actor and 5 for a replica, they would keep out those that answer or cancel them."""
RANK_SHARE, ENGINE_SHARE = 0.75, 0.25
"""Parts that rank and engine reserve of a GPU that they share. No two ranks fit on one, and they start first:
so no two engines do."""
MODEL_NAME = "policy"
"""Name of the policy for OpenAI clients, unless another is given."""


@dataclass
class FleetConfig:
    """The rollout actors. Each holds one agent and one environment."""

    num_actors: int = setting(16, at_least=1, at_most=100_000)
    """Rollout actors, and so the rollouts that run at the same time. A run has by default as many
    as an update has rollouts, so that none waits for another, but at most eight for a CPU core."""
    max_actors: int | None = setting(None, at_least=1, at_most=100_000)
    """The most rollout actors, of which fleet.num_actors are then the fewest. In training their number
    follows what an update waits for; in launch.serve there is one for each message and conversation, and one
    spare. Null means fleet.num_actors, always."""
    pairs_per_actor: int = setting(1, at_least=1, at_most=1000)
    """Pairs that share a rollout actor. Above 1 each has a process of its own, forked from one that has
    imported the agent's and the environment's modules: it starts sooner and takes less memory, and keeps its
    own limits and crashes. Such a process cannot call Ray, Ray's memory monitor does not count it, and a
    random generator that a module makes when it is imported is the same in all of them."""
    nodes: dict[str, Any] = field(default_factory=lambda: {"CPU": 0.01})
    """Needs of a pair on its node. A number is reserved for each: more CPU for environments that
    compute, or what ``ray start --resources`` names. A word is a label that the node has, as ``ray start
    --labels`` sets it: {CPU: 1, market: spot}. Ray's forms "!spot", "in(spot,reserved)" and
    "!in(spot,reserved)" are known too."""
    retries: int = setting(2, at_least=0)
    """Number of times that a rollout is started again after an error of the agent, the environment or the
    server, or after the death of its actor. A rollout that reaches its time limit is not started again."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most rollout actors."""
        return self.num_actors, self.max_actors or self.num_actors


@dataclass
class AccessConfig:
    """Users of the endpoint, and their limits. Rollouts do not go over HTTP and need none of it."""

    hosts: list[str] = field(default_factory=list)
    """Names under which clients reach the endpoint, beside localhost and http_host. A request for another
    name, or from a web page of another one, is rejected. One of them may be the address of a proxy, such as
    https://my.example/troupe; agent cards have it. Without one they have the address that a client has asked
    at, with the proxy's X-Forwarded-Prefix."""
    keys_file: str | None = None
    """File with one API key a line: its name and its SHA-256 in hexadecimal; it is read anew when it changes.
    Keys may also stand in the variable TROUPE_API_KEYS=name:key,name:key. An address other than loopback
    needs at least one."""
    per_minute: dict[str, int] = field(default_factory=dict)
    """Most requests and tokens a minute of an API key, prompts and answers together: {requests: 60, tokens:
    100000}. A replica allows its share: the limit divided by the largest number of replicas."""
    max_sampled_answers: int = setting(64, at_least=1)
    """Answers over HTTP that an engine samples at the same time; others wait, in their order. The rest of an
    engine's places, of which vLLM has 256, is for rollouts. A replica has four times as many requests open;
    one more gets status 503."""
    max_request_seconds: float = setting(600.0, above=0)
    """Seconds that a request over HTTP may take; then it gets status 504, and its sampling ends."""

    @property
    def public_url(self) -> str | None:
        """The address of a proxy among the hosts."""
        return next((host for host in self.hosts if "://" in host), None)


@dataclass
class AgentsConfig:
    """Served agents. A rollout actor keeps agent and environment of its last answer for the next message."""

    temperature: float = setting(1.0, at_least=0, at_most=2)
    """Sampling temperature where a message says none, as over A2A and MCP, which have no word for it."""
    instructions: str = setting("reject", one_of=("reject", "ignore", "prepend"))
    """Treatment of a client's system prompt: an agent has instructions of its own. reject: status 400.
    ignore: it is left out. prepend: it stands before the first message."""
    keep_seconds: float = setting(600.0, at_least=0)
    """Seconds that an environment waits for the next message; then it is closed. It is closed earlier where
    all rollout actors are taken and another message comes. A later message rebuilds an environment that has
    resumes_by, and is an error for any other."""
    unknown_history: str = setting("reject", one_of=("reject", "replay"))
    """Answer to a client that sends a whole conversation which this server has not had. reject: status
    409. replay: a new environment gets its messages and the answers that the client has, each as one turn."""
    second_message: str = setting("reject", one_of=("reject", "wait"))
    """Treatment of a message while another message of its conversation is being answered. reject: status
    409, after which OpenAI's clients send it again by themselves. wait: the messages are answered one after
    the other."""


@dataclass
class RecordingConfig:
    """Answers that are kept with their tokens, so that a training can learn from their clients' feedback."""

    folder: str | None = None
    """Folder in which answers are kept under their ids, so that their clients may send feedback on them. All
    machines with a part of the server have to share it. Null keeps none. A client keeps its answer out by the
    header X-Troupe-Record: no."""
    keep_days: float = setting(30.0, above=0)
    """Days after which an answer is deleted with its feedback."""
    readers: list[str] = field(default_factory=lambda: ["training"])
    """Names of the trainings that may read the folder. Clients see them with their feedback."""


@dataclass
class ServerConfig:
    """The policy server."""

    num_replicas: int = setting(1, at_least=1, at_most=10_000)
    """Replicas of the engine that serve the policy."""
    max_replicas: int | None = setting(None, at_least=1, at_most=10_000)
    """The most replicas. Serve starts another one while more than server.tokens_per_replica tokens are in
    flight for each. Null means server.num_replicas, always."""
    tokens_per_replica: int = setting(16384, at_least=1)
    """Tokens in flight that one replica is to have, with server.max_replicas: of prompts, and of the answers
    that they may get."""
    colocated: bool = False
    """Engines and learner take turns on the same devices, with rollout.max_staleness=0: while the learner
    learns, the engines have given back their cache, and on GPUs their weights; while they sample, the
    learner's state lies on the host. On GPUs each engine shares one with a rank."""
    nodes: dict[str, Any] = field(default_factory=lambda: {"CPU": 0.5})
    """Needs of a replica on its node: see fleet.nodes."""
    http_port: int | None = setting(None, at_least=1, at_most=65535)
    """Port of the OpenAI-compatible endpoint. With null, launch.serve takes 8000, and the others serve
    their own rollouts only."""
    http_host: str = "127.0.0.1"
    """Address that the endpoint listens on; 0.0.0.0 for every interface. All but loopback need a key: see
    server.access."""
    access: AccessConfig = field(default_factory=AccessConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters that ``launch.serve`` serves beside the model, {name: folder}: a run's, a checkpoint's or
    one in peft's format. Clients ask for them by ``model``, rollouts by ``SamplingParams.adapter``."""
    versions: list[str] = field(default_factory=list)
    """Checkpoints of the run of model.path that ``launch.serve`` serves beside it, each by an engine of its
    own: best, or a version of the policy, such as [best,31]. Clients ask for policy@best and policy@31."""
    tool_parser: str | None = None
    """Form of the model's tool calls, by the agent's parser_name: hermes, qwen3-coder, deepseek-v3, mistral,
    llama3-json, one of vLLM's such as vllm:kimi_k2, or your own as my_module:MyParser. Null takes what the
    model's chat template shows."""
    reasoning_parser: str | None = None
    """Marks of the model's thoughts, by the name of a parser of vLLM such as vllm:granite: clients get
    them as reasoning_content, and no tool call in them counts. Null knows the marks of most models, such as
    <think>, and leaves finished thoughts in the text."""
    weights: dict[str, Any] = field(default_factory=lambda: {"transport": "object_store"})
    """Way of the weights from the learner to the engines, in training: by the transport object_store (Ray's),
    deltas (the same, with changes to a whole version, for engines of bfloat16 and low learning rates), files
    (in a folder that nodes share), nccl (between GPUs; nobody has run it), or your own as
    my_module:MyTransport, with its arguments beside it: {transport: files, shared_folder: /shared/weights}.
    Without shared_folder it is one in run.directory."""
    engine: EngineConfig = field(default_factory=EngineConfig)

    @property
    def model_names(self) -> list[str]:
        """Names by which clients ask for the model, its adapters and its older versions."""
        return [MODEL_NAME, *self.adapters, *map(pinned_name, self.versions)]

    @property
    def gpus_of_engine(self) -> float:
        """GPUs that a replica reserves."""
        return min(self.engine.num_gpus, ENGINE_SHARE) if self.colocated else self.engine.num_gpus

    @property
    def gpus_of_rank(self) -> float:
        """GPUs that a rank of the policy reserves, where it is on one."""
        return RANK_SHARE if self.colocated else 1.0

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas at the same time."""
        return self.max_replicas or self.num_replicas


def pinned_name(version: str) -> str:
    """Name by which clients ask for one of ``server.versions``."""
    return f"{MODEL_NAME}@{version}"


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model for replicas: the policy, or a checkpoint that is served beside it.

    Args:
        path: its folder in Hugging Face format.
        name: by which clients ask for it, such as policy@best.
        version: of the policy that it holds.
        chat_template_kwargs: options of the chat template for clients, whose requests may set others.
    """

    path: str
    name: str = MODEL_NAME
    version: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> str:
        """``SamplingParams.policy`` of rollouts that it samples: @best for policy@best, else nothing."""
        return "".join(self.name.partition("@")[1:])
