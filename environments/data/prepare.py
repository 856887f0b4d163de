"""Writes known public data sets into the registry, under the names and columns that programs expect.

python -m environments.data.prepare gsm8k --from downloads/gsm8k        # a folder with a file per split
python -m environments.data.prepare aime2024 --from problems.parquet    # or .jsonl, .json, .csv
python -m environments.data.prepare hotpotqa_combined --from hub
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from environments.bounds import near_name
from environments.command_name import command_name, command_parser, explained
from environments.data.dataset_files import READERS, Row, read_rows, without_filling
from environments.data.datasets import Dataset, DatasetRegistry
from environments.data.task_columns import EMPTY, QUESTIONS, column_of, marked_answer
from environments.errors import DatasetError
from environments.rewards.reading import last_boxed

CORPUS = "search_corpus"
"""Name under which the retrieval tool looks for its passages."""
HUB = "hub"
CONTEXT = "context"
"""HotpotQA's column of passages: ten to a question, so they become the corpus and leave the tasks."""
MAX_NAMED = 3
MAX_EXAMPLE = 200

_SHARD = re.compile(r"\d+-of-\d+")
"""Number of a file of several that are parts of one split."""
_BARE_BOX = re.compile(r"\\boxed ([^{$]+)\$")


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last box; some solutions of MATH have ``\boxed 2$``, without braces."""
    inside = last_boxed(text)
    if inside is None:
        inside = next(iter(reversed(_BARE_BOX.findall(text))), None)
    return None if inside is None else inside.strip()


TRAIN_AND_TEST = {"train": ("train",), "test": ("validation", "dev", "test")}
TEST_ONLY = {"test": ("test", "train")}
"""Some test sets have one split, which the hub calls "train"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A public data set: its address, and how a task is read from its rows."""

    hub: str
    config: str | None = None
    splits: Mapping[str, Sequence[str]] = field(default_factory=lambda: TRAIN_AND_TEST)
    """Names that a registered split has in the original; the first that is there is taken."""
    answer: str = "answer"
    """Column of the right answer. The question's is one of ``QUESTIONS``."""
    read_answer: Callable[[str], str | None] = str.strip
    """Function that takes the answer from the text of its column, if one is there."""
    answer_form: str = "text"
    """Description of what ``read_answer`` finds, for messages."""
    only_here: str | None = None
    """Column by which its rows differ from those of the other sources of a set."""
    reward: str = "math"


BOXED = r"answer in \boxed{}"
SOURCES: dict[str, Source] = {
    "aime2024": Source(hub="HuggingFaceH4/aime_2024", splits=TEST_ONLY),
    "aime2025": Source(hub="math-ai/aime25", splits=TEST_ONLY),
    "deepscaler_math": Source(hub="agentica-org/DeepScaleR-Preview-Dataset", splits={"train": ("train",)}),
    "gsm8k": Source(
        hub="openai/gsm8k", config="main", read_answer=marked_answer, answer_form="answer behind '####'"
    ),
    "hotpotqa": Source(hub="hotpotqa/hotpot_qa", config="distractor", only_here="type", reward="search"),
    "math": Source(
        hub="DigitalLearningGmbH/MATH-lighteval",
        answer="solution",
        read_answer=boxed_answer,
        answer_form=BOXED,
    ),
    "math500": Source(hub="HuggingFaceH4/MATH-500", splits=TEST_ONLY),
    "natural_questions": Source(hub="google-research-datasets/nq_open", config="nq_open", reward="search"),
}
SETS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in SOURCES},
    "hotpotqa_combined": ("hotpotqa", "natural_questions"),
}
"""Sources of each set that can be prepared."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a split: a file, or a split on the hub. They can be read again."""

    place: str
    split: str
    rows: Callable[[], Iterable[Row]]


def prepare(name: str, places: Sequence[str], leave_out: bool = False) -> tuple[list[Dataset], list[str]]:
    """Write the splits of a known set, and HotpotQA's passages where no corpus is registered.

    All tasks are read before any is written. A row keeps its columns, but for HotpotQA's passages, and gets
    ``question``, ``ground_truth`` and ``data_source``, the name of its source.

    Args:
        name: a key of ``SETS``.
        places: files, folders, "hub", or "hub:" and another address there. Their rows are put together.
        leave_out: whether rows without a question or an answer are left out, instead of being an error.

    Returns:
        The splits as they were registered, and sentences about everything else.

    Raises:
        DatasetError: the name is unknown, a place holds no such data, or a row cannot be read.
    """
    if name not in SETS:
        raise DatasetError(
            f"Unknown data set: {name!r}.{near_name(name, SETS)} There are: {', '.join(sorted(SETS))}. Any "
            "other file of tasks needs no preparation: train with dataset=FILE."
        )
    unused: list[str] = []
    parts = [part for place in places for part in _parts(name, place, unused)]
    tasks: dict[str, list[Row]] = {}
    unreadable: list[str] = []
    for part in parts:
        tasks.setdefault(part.split, []).extend(_tasks(name, part, unreadable))
    notes = [f"Not used, as their names fit no split: {', '.join(unused)}."] if unused else []
    expected = SOURCES[SETS[name][0]].splits
    notes += [f"Nothing found for {name}/{each}." for each in expected if each not in tasks]
    if unreadable:
        more = f", and {len(unreadable) - MAX_NAMED} more" if len(unreadable) > MAX_NAMED else ""
        reasons = f"{'; '.join(unreadable[:MAX_NAMED])}{more}"
        if not leave_out:
            raise DatasetError(
                f"{len(unreadable)} rows cannot be read: {reasons}. Correct them, or leave them out with "
                "--leave-out."
            )
        notes.append(f"Rows left out: {len(unreadable)} ({reasons}).")
    for split, rows in tasks.items():
        if not rows:
            where = ", ".join(part.place for part in parts if part.split == split)
            raise DatasetError(f"{name}/{split} has no rows: {where} holds none. Name another place.")
    splits = [DatasetRegistry.register_dataset(name, rows, split) for split, rows in sorted(tasks.items())]
    return splits, notes + (_write_corpus(parts) if "hotpotqa" in SETS[name] else [])


def _write_corpus(parts: Sequence[Part]) -> list[str]:
    if DatasetRegistry.dataset_exists(CORPUS, "default"):
        remedy = f"To replace it, DatasetRegistry.remove_dataset({CORPUS!r}) and prepare again."
        return [f"{CORPUS} is registered already and was left as it is. {remedy}"]
    passages = _passages(parts)
    first = next(passages, None)
    if first is None:
        return [f"No {CORPUS}: the rows have no passages in {CONTEXT!r}. Register one for local_search."]
    corpus = DatasetRegistry.register_dataset(CORPUS, chain([first], passages))
    return [f"{CORPUS}: {len(corpus)} passages, for the tool local_search."]


def _passages(parts: Iterable[Part]) -> Iterator[Row]:
    """Yield HotpotQA's passages, each title once: the hub has columns of them, the project's site pairs."""
    titles: set[str] = set()
    for row in chain.from_iterable(part.rows() for part in parts):
        match row.get(CONTEXT):
            case {"title": names, "sentences": texts}:
                pairs = list(zip(names, texts, strict=True))
            case [*pairs]:
                pass
            case _:
                pairs = []
        for title, sentences in pairs:
            if title not in titles:
                titles.add(title)
                text = " ".join(sentence.strip() for sentence in sentences)
                yield {"id": f"hotpotqa-{len(titles)}", "title": title, "text": text}


def _tasks(name: str, part: Part, unreadable: list[str]) -> Iterator[Row]:
    """Yield the tasks of a part, and add the places of rows that are none to ``unreadable``."""
    for index, row in enumerate(part.rows()):
        place = f"{part.place}, row {index}"
        source_name, question, answer = _source_and_columns(name, place, row)
        source, truth = SOURCES[source_name], row[answer]
        if isinstance(truth, str):
            truth = source.read_answer(truth)
        if row[question] in EMPTY:
            unreadable.append(f"{place} has no question in {question!r}")
        elif truth in EMPTY:
            unreadable.append(f"{place} has no {source.answer_form} in {answer!r}")
        else:
            task = {"question": row[question], "ground_truth": truth, "data_source": source_name}
            yield {column: value for column, value in row.items() if column != CONTEXT} | task


def _source_and_columns(name: str, place: str, row: Row) -> tuple[str, str, str]:
    """Return the source whose columns ``row`` has, and those of its question and its answer."""
    names = SETS[name]
    question = column_of(row, QUESTIONS)
    for each in names:
        answer = column_of(row, [SOURCES[each].answer])
        is_own = len(names) == 1 or SOURCES[each].only_here in (None, *row)
        if question is not None and answer is not None and is_own:
            return each, question, answer
    answers = " or ".join(dict.fromkeys(SOURCES[each].answer for each in names))
    raise DatasetError(
        f"{place} has the columns {', '.join(row)}: {name} needs a question in one of "
        f"{', '.join(QUESTIONS)}, and the right answer in {answers}. Rename the columns."
    )


def _parts(name: str, place: str, unused: list[str]) -> list[Part]:
    """Return what there is of a set in one place, and add files that fit no split to ``unused``."""
    kind, _, address = place.partition(":")
    if kind == HUB:
        hubs = [address] if address else [SOURCES[each].hub for each in SETS[name]]
        return [part for each in hubs for part in _parts_on_hub(name, each)]
    path = Path(place)
    if not path.exists():
        raise DatasetError(
            f"There is no file or folder {path.absolute()}. Correct the path; an address on the hub is "
            f"--from {HUB}:{place}."
        )
    for config in (SOURCES[each].config for each in SETS[name]):
        if config is not None and (path / config).is_dir():  # as in a copy of the hub's repository
            path = path / config
    folder = path if path.is_dir() else path.parent  # whose own name says nothing of splits
    files = {str(file.relative_to(folder)): file for file in _readable_files(path)}
    splits = _splits_of(name, place, list(files))
    parts = [Part(str(files[each]), split, partial(read_rows, files[each])) for each, split in splits.items()]
    unused += sorted({str(file) for file in files.values()} - {part.place for part in parts})
    return parts


def _readable_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in READERS and file.is_file()]
    return [file for file in files if not any(each[0] == "." for each in file.relative_to(path).parts)]


def _parts_on_hub(name: str, address: str) -> list[Part]:
    import datasets

    wanted = {SOURCES[each].config for each in SETS[name]}
    parts: list[Part] = []
    try:
        config = next((each for each in datasets.get_dataset_config_names(address) if each in wanted), None)
        names = datasets.get_dataset_split_names(address, config)
        for each, split in _splits_of(name, address, names).items():
            place, rows = f"{address}/{each}", datasets.load_dataset(address, config, split=each)
            parts.append(Part(place, split, partial(without_filling, rows, place)))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DatasetError(
            f"{name} cannot be loaded from {address} on the hub: {error}. Put its files into a folder and "
            "pass --from FOLDER."
        ) from error
    return parts


def _splits_of(name: str, place: str, names: Sequence[str]) -> dict[str, str]:
    """Return the registered split of each file's name, or split's on the hub, that belongs to one.

    The words of the name decide; a set of one split takes an only file, however it is named.
    """
    splits = SOURCES[SETS[name][0]].splits
    words = {each: re.findall("[a-z]+", each.lower()) for each in names}
    found: dict[str, str] = {}
    for split, originals in splits.items():
        fitting = ([each for each in names if original in words[each]] for original in originals)
        files = next(filter(None, fitting), [])
        if len({_SHARD.sub("", each) for each in files}) > 1:
            raise DatasetError(
                f"{place} has several files for {name}/{split}, which may be versions of the same tasks: "
                f"{', '.join(files)}. Name those that you want: --from FILE FILE."
            )
        found |= dict.fromkeys(files, split)
    if not found and len(splits) == len(names) == 1:
        found = {names[0]: next(iter(splits))}
    if not found:
        raise DatasetError(
            f"{place} has {', '.join(names) or 'no file that can be read'}, and {name} needs "
            f"{' and '.join(splits)}. Name each file for its split, such as {next(iter(splits))}.jsonl; "
            f"known formats: {', '.join(READERS)}."
        )
    return found


def report(name: str, splits: Sequence[Dataset], notes: Sequence[str]) -> str:
    """Return what was written, an example, and the command that trains on it."""
    lines = [
        f"{name}/{each.split}: {len(each)} tasks, columns {', '.join(dict.fromkeys(chain(*each)))}."
        for each in splits
    ]
    example = {key: splits[0][0][key] for key in ("question", "ground_truth")}
    text = json.dumps(example, ensure_ascii=False)
    lines.append(f"For example {text[:MAX_EXAMPLE]}{'...' if len(text) > MAX_EXAMPLE else ''}")
    lines += notes
    settings = f"agent=math reward={SOURCES[SETS[name][0]].reward} model.path=Qwen/Qwen3-4B"
    names = [each.split for each in splits]
    held_out = f" held_out={name}" if "test" in names else ""
    if "train" in names:
        lines.append(f"Train: {command_name('train')} dataset={name}{held_out} {settings}")
    else:
        lines.append(f"Evaluate: {command_name('evaluate')} dataset={name}/test {settings}")
        lines.append(f"While training on other tasks: {held_out.strip()}")
    return "".join(f"{line}\n" for line in lines)


@explained()
def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, or 2 for a printed reason."""
    options = command_parser("environments.data.prepare", __doc__)
    options.add_argument("name", help=f"one of {', '.join(sorted(SETS))}")
    options.add_argument(
        "--from",
        dest="places",
        metavar="PLACE",
        nargs="+",
        required=True,
        help="a file, a folder with a file per split, hub, or hub:ADDRESS; several are put together",
    )
    options.add_argument("--leave-out", action="store_true", help="leave out rows without question or answer")
    given = options.parse_args(arguments)
    splits, notes = prepare(given.name, given.places, given.leave_out)
    sys.stdout.write(report(given.name, splits, notes))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
