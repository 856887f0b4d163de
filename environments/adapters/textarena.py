"""TextArena's games, alone, against an opponent, or by self-play."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from environments.adapters import foreign, unknown
from environments.base import WorldEnvironment
from environments.chat_endpoint import ChatEndpoint
from environments.errors import ConfigError, EnvironmentFailure
from environments.thoughts import split_thought

Opponent = Callable[[str], str]
"""``opponent(observation)``: the answer of the other player to all that it has seen of the game."""

Result = tuple[str, float, bool, dict[str, Any]]
"""Observation, reward, done and info."""
_WORD_LISTS: dict[str, set[str]] = {}
"""The word lists that each game has asked NLTK for, mostly when its module is imported: once in a process."""
_MAX_OPPONENT_MOVES = 100
"""Limit of moves in a row. A game that never gives the turn back would otherwise go on for ever."""


class TextArenaEnvironment(WorldEnvironment):
    """A game of TextArena by its id: single-player, or two-player if there is an ``opponent``.

    The agent is ``player`` (0 begins). It sees the news since its last turn; the opponent is shown
    all that it has seen so far. The only reward is that of the agent's side when the game ends, as TextArena
    gives it: 1, 0 or -1 in most games for two. The game itself answers invalid moves; most games allow one.

    The opponent is a plain function, or the policy of a server (``PolicyOpponent``), whose moves are not
    learned from; ``TextArenaSelfPlay`` learns from those of both. Vary ``player`` from task to task, so that
    the policy learns both sides.

    A success is a game for two that the agent's side has won, or a game for one with the full reward of 1.

    Where the opponent begins and loses at once, the first observation says so, and any action ends the
    episode with the reward of that game.

    A task without a ``seed`` gets that of its rollout, which makes another game of each attempt. TextArena
    draws from Python's global generator. ``game_args`` are for the game's constructor.
    """

    wants_seed = True

    def __init__(
        self,
        env_id: str,
        opponent: Opponent | None = None,
        player: int = 0,
        seed: int | None = None,
        game_args: dict[str, Any] | None = None,
    ) -> None:
        num_players = 1 if opponent is None else 2
        if not 0 <= player < num_players:
            raise ConfigError(
                f"player={player} does not exist among {num_players}: players count from 0, and a second one "
                "needs an opponent, a function from its observation to its answer."
            )
        self.player = player
        self._env_id = env_id
        self._opponent = opponent
        self._num_players = num_players
        self._seed = seed
        self._game_args = game_args or {}
        self._shown: dict[int, str] = {}
        """All that each player has seen of the game."""
        self._done = True
        self._is_won: bool | None = False
        self._early_ending: Result | None = None
        self._fresh_game: Any = _make(env_id, self._game_args)  # already here, so that errors are early
        self._game: Any = None

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Begin the game, up to the agent's first turn."""
        self._begin()
        observation, reward, done, info = self._play_on(done=False)
        self._early_ending = (observation, reward, done, info) if done else None
        self._done = False
        if done:
            observation = f"{self._env_id} ended before your first turn: {observation} Answer anything."
        return {"question": observation}, {}

    def _begin(self) -> None:
        # Anew each time: some of TextArena's wrappers remember the game before.
        self._game = self._fresh_game or _make(self._env_id, self._game_args)
        self._fresh_game = None
        with _playable_here(self._env_id):
            try:
                self._game.reset(num_players=self._num_players, seed=self._seed)
                several = foreign("textarena", "textarena").FFAMultiPlayerState
                if self._num_players == 1 and isinstance(self._game.state, several):  # it would never end
                    raise ValueError("it is for several players")
            except (AssertionError, ValueError) as error:  # that is how TextArena counts the players
                if "player" not in str(error).lower():
                    raise
                raise ConfigError(
                    f"{self._env_id} is no game for {self._num_players}: {error}. "
                    "Give an opponent to a game for two, none to a game for one, and TextArenaSelfPlay the "
                    "num_players of its game."
                ) from error
            self._game.get_observation()  # some wrappers ask a game for what it does not show
        self._shown, self._is_won, self._done = {}, False, False

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Make the agent's move and then the opponent's. At the end, info holds all ``rewards`` and why."""
        if self._done:
            raise EnvironmentFailure(f"{self._env_id} is over or not begun: call reset() first.")
        if self._early_ending is not None:
            self._done = True
            return self._early_ending
        done, _ = self._game.step(str(action))
        return self._play_on(done)

    def is_correct(self) -> bool | None:
        return self._is_won

    @staticmethod
    def is_multithread_safe() -> bool:
        return False

    def _play_on(self, done: bool) -> tuple[str, float, bool, dict[str, Any]]:
        """Let the opponent move until it is the agent's turn or the game is over."""
        for _ in range(_MAX_OPPONENT_MOVES):
            if done:
                return self._ending()
            player, seen = self._game.get_observation()
            if player == self.player:
                return self._news(player, str(seen)), 0.0, False, {}
            if self._opponent is None:
                raise EnvironmentFailure(f"{self._env_id} waits for player {player}, who does not exist.")
            done, _ = self._game.step(str(self._opponent(str(seen))))
        raise EnvironmentFailure(
            f"{self._env_id} has not given the turn back after {_MAX_OPPONENT_MOVES} moves of the opponent."
        )

    def _news(self, player: int, seen: str) -> str:
        """The part that was not in the player's last observation: most games show all of it every time."""
        before, self._shown[player] = self._shown.get(player, ""), seen
        return seen.removeprefix(before).strip()

    def _ending(self) -> tuple[str, float, bool, dict[str, Any]]:
        self._done = True
        rewards, games = self._game.close()
        if rewards is None or self.player not in rewards:
            raise EnvironmentFailure(f"{self._env_id} ended without a reward for player {self.player}.")
        reason = str(games.get(self.player, {}).get("reason", ""))
        if isinstance(rewards[self.player], str):  # three games of 0.7.4 exchange them at an invalid move
            number = reason.removeprefix("Invalid Move: ")
            rewards, reason = {self.player: float(number)}, rewards[self.player]
        self._is_won = _is_won(rewards, self.player)
        info = {"rewards": {str(player): float(reward) for player, reward in rewards.items()}}
        return reason, float(rewards[self.player]), True, {**info, "reason": reason}


class TextArenaSelfPlay(TextArenaEnvironment):
    """A game of TextArena for ``num_players``, all of whom are the policy in training.

    Its agent is a ``SeatsAgent``, which keeps apart what each player sees and earns. The players are named
    by their numbers. Nobody's win is a success; ``player_0_reward`` and so on are metrics.
    """

    def __init__(
        self,
        env_id: str,
        num_players: int = 2,
        seed: int | None = None,
        game_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(env_id, seed=seed, game_args=game_args)
        self._num_players = num_players
        self._rewards: dict[str, float] = {}

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        self._begin()
        self._rewards, self._is_won = {}, None
        return self._turn(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Make the move of the player whose turn it is. At the end, info holds all rewards and why."""
        if self._done:
            raise EnvironmentFailure(f"{self._env_id} is over or not begun: call reset() first.")
        done, _ = self._game.step(str(action))
        if not done:
            return self._turn(), 0.0, False, {}
        reason, reward, _, info = self._ending()
        self._rewards, self._is_won = info["rewards"], None
        return reason, reward, True, {**info, "seat_rewards": self._rewards}

    def compute_metrics(self) -> dict[str, float]:
        return {f"player_{player}_reward": reward for player, reward in self._rewards.items()}

    def _turn(self) -> dict[str, str]:
        self.player, seen = self._game.get_observation()
        return {"seat": str(self.player), "question": self._news(self.player, str(seen))}


def _is_won(rewards: dict[int, float], player: int) -> bool | None:
    """Return whether ``player`` has won; ``None`` of a game alone that counts points, so that nothing is a
    win."""
    own, others = rewards[player], [reward for other, reward in rewards.items() if other != player]
    if others:
        return bool(own > max(others))
    return bool(own == 1) if own <= 1 else None


@dataclass(frozen=True)
class PolicyOpponent:
    """Plays with the model ``model`` of an OpenAI-compatible server, such as the server of this run.

    ``PolicyOpponent("http://localhost:8000/v1")`` together with ``server.http_port=8000`` is self-play:
    the opponent is the policy as it is at that moment. Its tokens are not in the agent's trajectory.
    """

    base_url: str
    model: str = "policy"
    temperature: float = 1.0
    max_tokens: int = 1024
    timeout_seconds: float = 120.0

    def __call__(self, observation: str) -> str:
        """Return the answer to ``observation`` without its thought, or raise an EnvironmentFailure."""
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        endpoint = ChatEndpoint(
            self.base_url, self.model, options=options, timeout_seconds=self.timeout_seconds
        )
        return split_thought(endpoint.reply([{"role": "user", "content": observation}]).text)[1]


def _make(env_id: str, game_args: dict[str, Any]) -> Any:
    textarena = foreign("textarena", "textarena")
    games = foreign("textarena.envs.registration", "textarena").ENV_REGISTRY
    if env_id not in games:
        raise unknown("TextArena game", env_id, games)
    with _playable_here(env_id):
        game = textarena.make(env_id, **game_args)
    wrappers = games[env_id].default_wrappers or ()
    if any(issubclass(wrapper, textarena.core.ObservationWrapper) for wrapper in wrappers):
        return game
    return textarena.wrappers.LLMObservationWrapper(game)  # else it shows parts of a conversation, no text


@contextmanager
def _playable_here(env_id: str) -> Iterator[None]:
    """Explain why a game cannot be played on this machine. Games that need word lists do not download
    them."""
    nltk = foreign("nltk", "nltk")
    wanted = _WORD_LISTS.setdefault(env_id, set())

    def note(names: str | list[str], *args: Any, **kwargs: Any) -> None:
        wanted.update([names] if isinstance(names, str) else names)

    download, nltk.download = nltk.download, note
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"TextArena cannot make {env_id}: {type(error).__name__}: {error}") from error
    except LookupError as error:
        names = sorted(wanted.union(re.findall(r"nltk\.download\('(\w+)'\)", str(error))))
        if not names:
            raise ConfigError(f"TextArena cannot make {env_id}: {error!r}") from error
        raise ConfigError(
            f"{env_id} needs {' and '.join(names)} of NLTK, which is not on this machine: run "
            f"python -m nltk.downloader {' '.join(names)} where there is a network."
        ) from error
    except SyntaxError as error:  # some games of 0.7.4 are written for Python 3.12
        raise ConfigError(f"{env_id} cannot be loaded by this version of Python: {error}.") from error
    finally:
        nltk.download = download
