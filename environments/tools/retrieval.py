"""A tool that searches a corpus of passages."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from environments.data.datasets import DatasetRegistry, Row
from environments.errors import ConfigError
from environments.tools.base import Tool, ToolOutput
from environments.tools.passage_index import Passage, PassageIndex, open_index


class LocalRetrievalTool(Tool):
    """Searches the dataset ``corpus``, whose rows have a "text" and, if you like, a "title" and an "id".

    Making one costs nothing. The first call opens the index of the corpus, which the first process of the
    node builds (see ``open_index``) and all of them share. For another corpus, pass
    ``LocalRetrievalTool.over("name")`` instead of this class, or ``over(rows)`` if the passages are few
    enough to travel with the class.
    """

    name = "local_search"
    description = "Searches a collection of texts and returns the passages that fit the query best."

    corpus: ClassVar[str] = "search_corpus"
    """Name in the ``DatasetRegistry``."""
    split: ClassVar[str] = "default"
    passages: ClassVar[Sequence[Row] | None] = None
    """The corpus itself, where it is in no registry; ``over`` gives it, and its fingerprint."""
    fingerprint: ClassVar[str] = ""
    max_top_k: ClassVar[int] = 20
    max_chars: ClassVar[int] = 600
    """Limit of a passage that the model is shown: 100 English words, the usual passage of such corpora."""

    @classmethod
    def over(cls, corpus: str | Iterable[Row], split: str = "default") -> type[LocalRetrievalTool]:
        """Return this tool for another corpus: a dataset's name, or the rows themselves.

        Raises:
            ConfigError: there are no rows.
        """
        if isinstance(corpus, str):
            return type(cls.__name__, (cls,), {"corpus": corpus, "split": split, "passages": None})
        rows = list(corpus)
        if not rows:
            raise ConfigError(f"{cls.__name__}.over(...) got no rows: pass a dataset's name, or passages.")
        fingerprint = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]
        return type(cls.__name__, (cls,), {"corpus": "rows", "passages": rows, "fingerprint": fingerprint})

    def forward(self, query: str, top_k: int = 5) -> ToolOutput:
        if not isinstance(query, str) or not query.strip():
            return ToolOutput(self.name, error="the query is empty: say in a few words what to look for.")
        if not isinstance(top_k, int) or not 1 <= top_k <= self.max_top_k:
            return ToolOutput(self.name, error=f"top_k={top_k!r}: use a number from 1 to {self.max_top_k}.")
        found = self.index().search(query, top_k)
        if not found:
            return ToolOutput(self.name, output="No passage fits this query. Try other words.")
        texts = [self._shown(rank, passage) for rank, (passage, _) in enumerate(found, 1)]
        metadata = {"ids": [passage.id for passage, _ in found], "scores": [score for _, score in found]}
        return ToolOutput(self.name, output="\n\n".join(texts), metadata=metadata)

    @classmethod
    def index(cls) -> PassageIndex:
        """Open the index, building it first if need be; called before a run, it saves the actors the wait.

        Raises:
            DatasetError: there is no such dataset, or it holds no passages.
            EnvironmentFailure: the index cannot be built, or not in time.
        """
        rows = cls.passages
        if rows is not None:
            return open_index(cls.corpus, cls.fingerprint, lambda: rows)
        path = DatasetRegistry.get_split_path(cls.corpus, cls.split)
        status = path.stat()
        digest = _fingerprint(path, status.st_size, status.st_mtime_ns)
        return open_index(cls.corpus, digest, lambda: DatasetRegistry.load_dataset(cls.corpus, cls.split))

    def _shown(self, rank: int, passage: Passage) -> str:
        text = " ".join(passage.text.split())
        if len(text) > self.max_chars:
            text = (text[: self.max_chars].rpartition(" ")[0] or text[: self.max_chars]) + " ..."
        return f"[{rank}] {passage.title}\n{text}" if passage.title else f"[{rank}] {text}"


@functools.lru_cache(maxsize=16)
def _fingerprint(path: Path, size: int, changed_ns: int) -> str:
    """A digest of the content: registering the same corpus again builds nothing. Read once a process."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
