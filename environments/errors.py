"""The errors that Troupe raises on purpose. Each message names the value at fault and the remedy."""

from __future__ import annotations


class TroupeError(Exception):
    """Base of all errors that are meant to be read by a person. Commands print it and exit with 2."""


class ConfigError(TroupeError):
    """A setting is unknown, impossible, or contradicts another."""


class DatasetError(TroupeError):
    """A dataset does not exist or cannot be read."""


class AgentError(TroupeError):
    """An agent broke its contract, for example by not appending a step."""


class EnvironmentFailure(TroupeError):
    """An environment raised or broke its contract."""


class ContractError(EnvironmentFailure):
    """An environment returned what no environment may return: it would do so on every machine."""


class SamplerError(TroupeError):
    """The policy could not be sampled: the server is unreachable or rejected the request."""


class PromptTooLongError(SamplerError):
    """The prompt leaves no room for a completion."""


class LogprobError(SamplerError):
    """An engine or server returned a log-probability that is not finite. The next request may succeed."""


class WeightsError(TroupeError):
    """Published weights cannot be read, or are not all that an engine has."""


class LearnerError(TroupeError):
    """The learner was given a batch that it cannot learn from, or its numbers left the finite range."""


class PartLostError(TroupeError):
    """An actor that a run has once has died. A run that is started anew can go on from a checkpoint."""


class LearnerLostError(PartLostError):
    """A rank of the learner has died or hangs. A learner that is started anew can go on from a checkpoint."""
