"""Canary: a version of a served policy that a share of its clients gets first, and the rule that ends this.

    recordings/canary.json    its name, its share, and what the rule has decided

The file lies in the folder of a server's recordings. ``python -m launch.recipes.canary`` writes it, and the
replicas of the server read it anew when it has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from environments.disk import replaced
from environments.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = "canary.json"
CONVERSATION, KEY = "conversation", "key"
TRIAL, PROMOTED, ROLLED_BACK = "trial", "promoted", "rolled back"
QUANTILE = 2.576
"""Quantile of the normal distribution for intervals of 99 %: a trial is judged again and again."""
MIN_JUDGED = 20
"""Conversations, or keys, with feedback that each version needs before feedback decides anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A version on trial beside the one in service."""

    version: str
    """Name by which clients can ask for it, such as ``policy@31``."""
    share: float
    """Part of the conversations, or of the keys, that it answers while it is on trial."""
    started: int
    """Start of the trial, in seconds of Unix time."""
    by: str = CONVERSATION
    """Unit that stays with one version: a conversation, or all of a key's."""
    state: str = TRIAL
    reason: str = ""
    """Sentence of the rule that has ended the trial."""

    def __post_init__(self) -> None:
        states, units = (TRIAL, PROMOTED, ROLLED_BACK), (CONVERSATION, KEY)
        is_share, is_time = 0 < self.share < 1, self.started >= 0
        if not ("@" in self.version and is_share and is_time and self.state in states and self.by in units):
            raise ValueError(f"{self}: a version, share, start, unit or state has a value that none can have")

    @property
    def served(self) -> str:
        """Name of the policy whose chats, and agents' messages, it takes a share of."""
        return self.version.partition("@")[0]

    def unit(self, owner: str, conversation: str) -> str:
        """The unit of a message of the key ``owner``, in a conversation by its name."""
        return owner if self.by == KEY else json.dumps([owner, conversation])

    def answers(self, unit: str) -> bool:
        """Return whether it answers a unit's messages, and not the version in service."""
        if self.state != TRIAL:
            return self.state == PROMOTED
        digest = hashlib.sha256(f"{self.version}\n{self.started}\n{unit}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.share * 2**64

    def write(self, folder: Path) -> None:
        """Write it into a folder of recordings, for the servers to read. Raises ``OSError``."""
        with replaced(folder / FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")


def conversation_name(messages: Sequence[Mapping[str, Any]]) -> str:
    """Name of a conversation, which the user's first messages give it: it stays when others follow, and when
    the system's change, which have the time of day in them, or come with a conversation's first request only.
    """
    asked = dropwhile(lambda each: each["role"] != "user", messages)  # an answer before it is a greeting
    first = takewhile(lambda each: each["role"] != "assistant", asked)
    texts = [each.get("content") for each in first if each["role"] == "user"]
    text = json.dumps(texts or [each.get("content") for each in messages])
    return hashlib.sha256(text.encode()).hexdigest()


class CanaryFile:
    """The canary of a folder of recordings, read anew when it has changed: for a server's replica."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._canary: Canary | None = None

    def drawn(self, owner: str, conversation: str, versions: Collection[str]) -> str | None:
        """The version that answers a message in place of the present one: one of ``versions``, or ``None``.

        Args:
            conversation: name of the message's conversation, which is of the key ``owner``.
            versions: names of all that are served beside the present one.
        """
        canary = self.current(versions)
        if canary is None or canary.version not in versions:
            return None
        return canary.version if canary.answers(canary.unit(owner, conversation)) else None

    def current(self, versions: Collection[str] = ()) -> Canary | None:
        """The present one, if there is any. A damaged file changes nothing, and is named in the log; so is a
        canary that is none of the ``versions`` that are served beside the present one, which answers nothing.
        """
        try:
            state = (self._folder / FILE).stat()
        except FileNotFoundError:
            self._canary = self._stamp = None
            return None
        except OSError as error:  # of the file system that the servers share, for a moment
            logger.error("The canary stays as it is: %s", error)
            return self._canary
        stamp = state.st_mtime_ns, state.st_ino
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._canary = read_canary(self._folder)
            except ConfigError as error:
                logger.error("The canary stays as it is: %s", error)
            canary, served = self._canary, ", ".join(versions) or "none"
            if canary is not None and canary.version not in versions and canary.state != ROLLED_BACK:
                logger.error("The canary %s answers nothing: served are %s.", canary.version, served)
        return self._canary


def read_canary(folder: Path) -> Canary | None:
    """The canary of a folder of recordings, if it has one. Raises ``ConfigError`` for a file that is damaged
    or cannot be read.
    """
    try:
        return Canary(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / FILE} is no canary ({error}): delete it.") from error


@dataclass(frozen=True, slots=True)
class Difference:
    """The canary's mean less that of the version in service, with an interval of 99 %."""

    mean: float
    half_width: float
    num_canary: int
    num_served: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def difference(canary: Sequence[float], served: Sequence[float], *, quantile: float = QUANTILE) -> Difference:
    """The difference of two independent samples of values from -1 to 1 (Welch 1947, by the normal
    distribution).

    A sample of fewer than two values leaves it open: the interval has no end.
    """
    if min(len(canary), len(served)) < 2:
        return Difference(0.0, math.inf, len(canary), len(served))
    error = math.sqrt(_squared_error(canary) + _squared_error(served))
    return Difference(fmean(canary) - fmean(served), quantile * error, len(canary), len(served))


def paired_difference(canary: Sequence[float], served: Sequence[float]) -> Difference:
    """The difference on the same tasks, one value a task: of equal length, else ``ValueError``."""
    differences = [mine - other for mine, other in zip(canary, served, strict=True)]
    number = len(differences)
    if number < 2:
        return Difference(0.0, math.inf, number, number)
    half_width = QUANTILE * math.sqrt(_squared_error(differences))
    return Difference(fmean(differences), half_width, number, number)


def _squared_error(values: Sequence[float]) -> float:
    """Squared standard error of a mean of values from -1 to 1, of which each end counts once more.

    Without those (Agresti and Caffo 2000) few values that are all alike would leave no doubt.
    """
    counted = [*values, -1.0, 1.0]
    return variance(counted) / len(counted)


def decide(feedback: Difference, held_out: Difference | None, margin: float) -> tuple[str, str]:
    """The state that a trial comes to, and why; ``TRIAL`` where it goes on.

    1. Held-out success has fallen: rolled back, whatever the feedback; if that has risen, it is an alarm.
    2. Feedback has fallen: rolled back.
    3. Neither is lower by more than ``margin``: promoted.
    4. Else the trial goes on.

    Fallen means that the whole interval is below 0, and not lower by more than the margin that the lower end
    of the interval is at least ``-margin``.
    """
    is_enough = min(feedback.num_canary, feedback.num_served) >= MIN_JUDGED
    if held_out is not None and held_out.high < 0:
        if is_enough and feedback.low > 0:
            return ROLLED_BACK, (
                f"ALARM: feedback has risen by {feedback}, and held-out success has changed by {held_out}: "
                "the feedback rewards something else than the tasks do."
            )
        return ROLLED_BACK, f"Held-out success has fallen: {held_out}."
    if not is_enough:
        return TRIAL, (
            f"There is feedback on {feedback.num_canary} of the canary's and {feedback.num_served} of the "
            f"others: each needs {MIN_JUDGED}."
        )
    if feedback.high < 0:
        return ROLLED_BACK, f"Feedback has fallen: {feedback}."
    if feedback.low < -margin:
        return TRIAL, f"Feedback may still be lower by more than {margin:g}: {feedback}."
    if held_out is None:
        return TRIAL, "Feedback is no worse, and nothing is promoted without --held-out: see launch.evaluate."
    if held_out.low < -margin:
        return TRIAL, (
            f"Held-out success may be lower by more than {margin:g}: {held_out}. Evaluate on more tasks."
        )
    return PROMOTED, f"Neither feedback ({feedback}) nor held-out success ({held_out}) is lower."
