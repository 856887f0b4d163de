"""An index of passages on disk: built once, by the first process that needs it, and read by all of a node.

bm25s weighs the words when the index is built. Searching is a sum over its weights, done here by numpy on
memory-mapped files: importing bm25s brings a compiler that takes 85 MB, in each actor.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import re
import shutil
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.errors import DatasetError, EnvironmentFailure

FORMAT = "1"
"""Part of an index's name; changes with the files, and with the rules for words."""

_BUILD_SECONDS = 1800.0
_BUILD_POLL_SECONDS = 0.05
_MAX_WORD_BYTES = 32

_FREQUENT = """
    a an and are as at be been but by did do does for from had has have he her his how if in into is it its
    of on or she that the their them then there these they this to was were what when where which who whom
    whose why will with
"""
_STOP_WORDS = frozenset(_FREQUENT.split())
"""Words that stand in every passage; a search for nothing else finds nothing."""


@dataclass(frozen=True)
class Passage:
    """A text that can be found. ``id`` is its position in the corpus where the row has none."""

    id: str
    title: str
    text: str


class PassageIndex:
    """Finds the passages that share the rarest words with a query (BM25, in the variant of Lucene).

    Words stand between spaces and punctuation, and are compared without case, accents and plural endings:
    for languages that write words apart, English above all. Loading maps files into memory and copies
    nothing; pages that were read are in the page cache once, for all processes. Threads may search at the
    same time.
    """

    def __init__(self, folder: Path) -> None:
        import numpy as np

        self._words, self._starts, self._passages, self._weights, self._lines = (
            np.load(folder / f"{name}.npy", mmap_mode="r")
            for name in ("words", "starts", "passages", "weights", "lines")
        )
        self._text = np.memmap(folder / "passages.jsonl", mode="r", dtype=np.uint8)

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._lines) - 1

    def search(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        """Return the best passages with their scores, best first; fewer than ``top_k`` where few fit."""
        import numpy as np

        scores = np.zeros(len(self), dtype=np.float32)
        # Of the same width as those in the index, which numpy would otherwise copy to make it so.
        wanted = np.array(words(query), dtype=self._words.dtype)
        for word, position in zip(wanted, np.searchsorted(self._words, wanted), strict=True):
            if position < len(self._words) and self._words[position] == word:
                entries = slice(self._starts[position], self._starts[position + 1])
                scores[self._passages[entries]] += self._weights[entries]  # each passage once per word
        found = np.flatnonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")[:top_k]]
        return [(self._passage(int(index)), float(scores[index])) for index in best]

    def _passage(self, index: int) -> Passage:
        line = self._text[self._lines[index] : self._lines[index + 1]].tobytes()
        return Passage(**json.loads(line))


def open_index(name: str, fingerprint: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> PassageIndex:
    """Return the index of the corpus ``rows()``, building it if no process has done so before.

    ``fingerprint`` tells one content of a corpus from another. The index lies in
    ``$TROUPE_HOME/indexes/<name>-<fingerprint>``. Of all processes that come at once, one builds it and the
    others wait. Opened again in the same process, it is the same object.

    Raises:
        DatasetError: a row is no passage, or there are no words in any.
        EnvironmentFailure: the index is not ready in time, or cannot be written or read.
    """
    home = Path(os.environ.get("TROUPE_HOME") or "~/.troupe").expanduser().absolute()
    folder = home / "indexes" / f"{name}-{fingerprint}-v{FORMAT}"
    try:
        if not folder.is_dir():
            _build_once(folder, rows)
        return _loaded(folder)
    except (OSError, ImportError, ValueError) as error:
        raise EnvironmentFailure(
            f"The index {folder} cannot be used: {type(error).__name__}: {error}. See to its disk, or remove "
            "the folder so that it is built again."
        ) from error


_loaded = functools.lru_cache(maxsize=16)(PassageIndex)


def _build_once(folder: Path, rows: Callable[[], Iterable[dict[str, Any]]]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with _locked(lock):
        if not folder.is_dir():
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: we hold its lock
            try:
                unfinished.mkdir()
                _build(unfinished, rows())
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
        lock.unlink(missing_ok=True)  # once the folder is there, the lock is not needed


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock at ``path``. The kernel frees it when its holder dies, however it dies."""
    deadline = time.monotonic() + _BUILD_SECONDS
    with path.open("w", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise EnvironmentFailure(
                        f"Another process has been building an index for {_BUILD_SECONDS:g} s (it holds "
                        f"{path}): build the index of so large a corpus before the run, by one search."
                    ) from error
                time.sleep(_BUILD_POLL_SECONDS)
        yield


def _build(folder: Path, rows: Iterable[dict[str, Any]]) -> None:
    import bm25s
    import numpy as np

    numbers: dict[bytes, int] = {}
    corpus: list[list[int]] = []
    lines = [0]
    with (folder / "passages.jsonl").open("wb") as file:
        for index, row in enumerate(rows):
            passage = _passage_of(row, index)
            found = words(f"{passage.title} {passage.text}")
            corpus.append([numbers.setdefault(word, len(numbers)) for word in found])
            file.write(json.dumps(vars(passage)).encode() + b"\n")
            lines.append(file.tell())
    if not numbers:
        raise DatasetError(f"There is no word in any of {len(corpus)} passages: give rows with a 'text'.")
    # Renumbered by the alphabet, so that a word is found by bisection and not in a dict in each process.
    alphabet = sorted(numbers)
    rank = {numbers[word]: position for position, word in enumerate(alphabet)}
    ranked = [[rank[number] for number in passage] for passage in corpus]
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # importing it sets DEBUG
    index = bm25s.BM25()
    vocabulary = {word: position for position, word in enumerate(alphabet)}
    index.index((ranked, vocabulary), create_empty_token=False, show_progress=False)
    arrays = {
        "words": np.array(alphabet, dtype=f"S{_MAX_WORD_BYTES}"),
        "starts": index.scores["indptr"],
        "passages": index.scores["indices"],
        "weights": index.scores["data"],
        "lines": np.array(lines, dtype=np.int64),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


def _passage_of(row: dict[str, Any], index: int) -> Passage:
    if not isinstance(row.get("text"), str):
        raise DatasetError(
            f"Row {index} of the corpus has the keys {', '.join(sorted(row)) or 'none'} and no 'text' that "
            "is a text: give each row a 'text', and if you like a 'title' and an 'id'."
        )
    return Passage(id=str(row.get("id", index)), title=str(row.get("title") or ""), text=row["text"])


def words(text: str) -> list[bytes]:
    """Return the words of ``text`` as they stand in the index, in order, each as often as it occurs."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    found = re.findall(r"\w+", plain)
    return [_singular(word).encode()[:_MAX_WORD_BYTES] for word in found if word not in _STOP_WORDS]


def _singular(word: str) -> str:
    """Return an English plural's singular (the S stemmer of Harman 1991, "How effective is suffixing?")."""
    if len(word) < 4:
        return word
    if word.endswith("ies") and not word.endswith(("eies", "aies")):
        return word[:-3] + "y"
    if word.endswith("es") and not word.endswith(("aes", "ees", "oes")):
        return word[:-1]
    return word[:-1] if word.endswith("s") and not word.endswith(("us", "ss")) else word
