"""Encoding a text in pieces, so that a prompt costs the tokenizer only what no earlier prompt has held."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import sys
import threading
from array import array
from collections.abc import Collection, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from policies.guard import GUARD

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

MAX_BYTES = 128 * 2**20
"""Bytes of the pieces that an encoder holds: those of 300 conversations of 32k tokens."""
ENTRY_BYTES = 300
"""Bytes of an entry beside its key and its value."""
BETWEEN = ("a b", " a", "\n\na", "a \n", "", "1", "é", "日本", "\u3000", "e\u0301.", "\U0001f600")
"""Texts between the names of control tokens that show whether a tokenizer splits there."""


class SizedCache(Generic[Key, Value]):
    """Values by key, up to a number of bytes. Threads may share it.

    There are two generations. When the younger one has half of the bytes, it becomes the older one, and what
    was in that is dropped, but for values that were used meanwhile: so a use costs one look into a dict.
    """

    def __init__(self, max_bytes: int) -> None:
        self._most = max_bytes // 2
        self._young: dict[Key, tuple[Value, int]] = {}
        self._old: dict[Key, tuple[Value, int]] = {}
        self._young_bytes = self._old_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._young_bytes + self._old_bytes

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, or ``None``."""
        entry = self._young.get(key)
        if entry is None and (entry := self._old.get(key)) is not None:
            self._put(key, entry)
        return None if entry is None else entry[0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Hold a value that has so many bytes together with its key, unless it alone has too many."""
        self._put(key, (value, num_bytes + ENTRY_BYTES))

    def _put(self, key: Key, entry: tuple[Value, int]) -> None:
        with self._lock:
            if key in self._young or entry[1] > self._most:
                return
            if self._young_bytes + entry[1] > self._most:
                self._old, self._young = self._young, {}
                self._old_bytes, self._young_bytes = self._young_bytes, 0
            self._young[key] = entry
            self._young_bytes += entry[1]


class PieceEncoder:
    """Encodes texts in pieces, to the ids that the tokenizer has for them as wholes.

    A fast tokenizer takes the names of its control tokens out of a text before it does anything else, and
    treats what stands between two of them apart. So a text is cut before each such name, and a piece, which
    is a name with the text behind it, has the same ids within any text. They are held: of a history that was
    rewritten, only pieces that are new are encoded.

    Each part of a text between two guards is encoded apart. Where the tokenizer splits in another way, each
    part is encoded as a whole, and a warning says so once.

    Args:
        tokenizer: of any kind.
        max_bytes: bytes of the pieces and ids that are held at most.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._held: SizedCache[str, array[int]] = SizedCache(max_bytes)
        self._cuts: re.Pattern[str] | None = None
        self._covering: frozenset[str] = frozenset()
        """Names that the pattern finds, and before which nothing is cut."""
        obstacle = _obstacle(tokenizer)
        if not obstacle:
            names, self._covering = _names(tokenizer)
            # The longest first: a tokenizer takes the longest name at each place, from left to right.
            longest_first = sorted(names | self._covering, key=len, reverse=True)
            self._cuts = re.compile("|".join(map(re.escape, longest_first)))
            if any(self.encode(text) != self._encode(text) for text in _probes(names)):
                obstacle, self._cuts = "a text has other ids than its pieces have", None
        if obstacle:
            _warn(str(tokenizer.name_or_path), obstacle)

    @property
    def is_separable(self) -> bool:
        """Return whether texts are encoded in pieces."""
        return self._cuts is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces and ids that are held."""
        return self._held.num_bytes

    def encode(self, text: str) -> array[int]:
        """The token ids of ``text`` as it stands, with no special tokens added."""
        ids = array("i")
        held = self._held.get
        for part in text.split(GUARD):
            if self._cuts is None:
                ids += self._encode(part)
            else:
                for piece in self._pieces(part, self._cuts):
                    ids += held(piece) or self._piece_ids(piece)
        return ids

    def _pieces(self, text: str, cuts: re.Pattern[str]) -> list[str]:
        if self._covering:
            starts = [found.start() for found in cuts.finditer(text) if found[0] not in self._covering]
        else:
            starts = [found.start() for found in cuts.finditer(text)]
        if starts[:1] != [0]:
            starts.insert(0, 0)
        return [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]

    def _piece_ids(self, piece: str) -> array[int]:
        ids = self._encode(piece)
        self._held.put(piece, ids, sys.getsizeof(piece) + sys.getsizeof(ids))
        return ids

    def _encode(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode(text, add_special_tokens=False))


def _obstacle(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return why a tokenizer may not split at the names of its control tokens; empty where it does."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return "it is a program of its own"
    backend = tokenizer.backend_tokenizer
    obstacles = {
        "it has an encode method of its own": any(
            getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name)
            for name in ("encode", "_encode_plus")
        ),
        "split_special_tokens is set": tokenizer.split_special_tokens,
        "it splits at random (dropout)": getattr(backend.model, "dropout", None),
        "its normalizer or pre-tokenizer is a program": not all(
            map(_is_known, (backend.normalizer, backend.pre_tokenizer))
        ),
        "some of its tokens are single words": any(token.single_word for token in _unnormalized(tokenizer)),
        "it has no control tokens": not any(map(_cuts_text, _unnormalized(tokenizer))),
    }
    return next((each for each, is_there in obstacles.items() if is_there), "")


def _is_known(step: Any) -> bool:
    """Return whether a step of the tokenizer is one of the library's: only those can be saved."""
    try:
        return step is None or bool(step.__getstate__())
    except Exception:  # noqa: BLE001  # the library raises nothing more special
        return False


def _unnormalized(tokenizer: PreTrainedTokenizerFast) -> list[AddedToken]:
    """The tokens that are taken out of a text before it is normalized."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return [token for token in added if token.content and not token.normalized]


def _cuts_text(token: AddedToken) -> bool:
    """Return whether a token is found by its name alone, whatever stands around that, and takes nothing of
    the text before it. White space at the start of its name could be taken by the token before.
    """
    return token.special and not token.lstrip and not token.content[0].isspace()


def _names(tokenizer: PreTrainedTokenizerFast) -> tuple[frozenset[str], frozenset[str]]:
    """The names before which a text may be cut, and those other names that may cover the beginning of one."""
    tokens = _unnormalized(tokenizer)
    names = frozenset(token.content for token in tokens if _cuts_text(token))
    beginnings = {name[:size] for name in names for size in range(1, len(name) + 1)}
    others = {token.content for token in tokens} - names
    covering = {
        other
        for other in others
        if any(other[start:] in beginnings for start in range(len(other)))
        or any(name in other for name in names)
    }
    return names, frozenset(covering)


def _probes(names: Collection[str]) -> Iterator[str]:
    """Texts with all names, and with all kinds of text between them."""
    for shift in range(2):
        between = itertools.islice(itertools.cycle(BETWEEN), shift, None)
        yield "a " + "".join(itertools.chain.from_iterable(zip(names, between, strict=False)))


@functools.cache
def _warn(name: str, obstacle: str) -> None:
    """Log once that prompts cost more than they should."""
    logger.warning(
        "The tokenizer %r may not split texts at the names of its control tokens (%s), so each prompt whose "
        "history was rewritten is encoded as a whole: about 4 ms of a CPU for 1,000 tokens.",
        name,
        obstacle,
    )
