"""Policy versions that sampled the tokens of a request."""

from __future__ import annotations


class VersionSpans:
    """Versions of a request's tokens, as spans: written when weights are exchanged, read when tokens leave.

    Args:
        version: the one that samples the first token.
    """

    __slots__ = ("_starts", "_versions", "num_taken")

    def __init__(self, version: int) -> None:
        self._starts, self._versions = [0], [version]
        self.num_taken = 0
        """Tokens whose versions were taken."""

    def exchanged(self, num_sampled: int, version: int) -> None:
        """Note that ``version`` samples from the token with index ``num_sampled`` on."""
        if self._starts[-1] == num_sampled:  # the version before has sampled nothing
            self._versions[-1] = version
        else:
            self._starts.append(num_sampled)
            self._versions.append(version)

    @property
    def newest(self) -> int:
        """The version that samples now."""
        return self._versions[-1]

    def take(self, count: int) -> tuple[int, ...]:
        """The versions of the next ``count`` tokens."""
        first, self.num_taken = self.num_taken, self.num_taken + count
        if self._starts[-1] <= first:
            return (self.newest,) * count
        versions: list[int] = []
        ends = [*self._starts[1:], self.num_taken]
        for start, end, version in zip(self._starts, ends, self._versions, strict=True):
            versions += [version] * (min(end, self.num_taken) - max(start, first))
        return tuple(versions)
