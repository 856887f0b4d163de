"""The agreement of a judge with labels that people have given.

    python -m environments.agreement my_judges:helpful --labels labels.jsonl
    python -m environments.agreement my_judges:best --labels pairs.jsonl --other other_response

Each row is a task with two more columns: an answer, and a label that is true (or 1) where the answer counts
as a success. With --other it has a second answer too, and the label is true where the first one is better.
The command prints how often the judge says the same, and Cohen's kappa, which is 0 where that is chance and 1
where it is always. A judge is any reward function; one that compares is given both answers, any other each of
them, and the larger reward counts. The exit status is 1 if an answer is left without a verdict, or a pair
without a better one; such rows count in neither number.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from environments.command_name import command_parser, explained
from environments.data.datasets import Dataset
from environments.errors import DatasetError, EnvironmentFailure
from environments.named_module import load_function
from environments.rewards.base import RewardFunction, judge, judge_group
from environments.rewards.group_judge import GroupJudge
from environments.rewards.judge import Judge, graded

LABELS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Agreement:
    """Labels beside verdicts."""

    counts: Counter[tuple[bool, bool]]
    """Number of answers by their label and their verdict."""
    failures: list[str]
    """The reasons for which answers have no verdict, with their rows."""

    @property
    def accuracy(self) -> float:
        """Share of the answers whose verdict is their label; NaN if there are none."""
        return self._share((True, True), (False, False))

    @property
    def kappa(self) -> float:
        """Agreement beyond chance, (accuracy - chance) / (1 - chance): chance is the accuracy of two who say
        true as often as these (Cohen 1960). NaN where all labels and verdicts are the same one.
        """
        labelled, judged = self._share((True, True), (True, False)), self._share((True, True), (False, True))
        chance = labelled * judged + (1 - labelled) * (1 - judged)
        return (self.accuracy - chance) / (1 - chance) if chance < 1 else float("nan")

    def _share(self, *cells: tuple[bool, bool]) -> float:
        total = self.counts.total()
        return sum(self.counts[each] for each in cells) / total if total else float("nan")

    def __str__(self) -> str:
        def cells(label: bool) -> str:
            return f"{self.counts[label, True]:>13} {self.counts[label, False]:>13}"

        lines = [
            f"{'':<11} {'judged true':>13} {'judged false':>13}",
            f"label true  {cells(True)}",
            f"label false {cells(False)}",
            f"accuracy {self.accuracy:.3f}, Cohen's kappa {self.kappa:.3f}, of {self.counts.total()} answers",
        ]
        if self.failures:
            lines.append(f"{len(self.failures)} without a verdict, the first one: {self.failures[0]}")
        return "\n".join(lines)


def agreement(
    reward_fn: RewardFunction, rows: Dataset, answer: str, label: str, other: str | None = None
) -> Agreement:
    """Compare the verdicts of ``reward_fn`` with labels.

    Args:
        rows: tasks, each with an answer to it and its label.
        answer, label: the names of these two columns.
        other: the name of the column of other answers, where labels are of pairs.

    Raises:
        DatasetError: a row lacks one of them, or has a label that is neither true nor false.
    """
    columns = {"--answer": answer} | ({} if other is None else {"--other": other})
    labels = [_label(row, columns, label, index) for index, row in enumerate(rows)]

    def verdict(index: int) -> bool | str:
        row = dict(rows[index])
        texts = [row.pop(column) for column in columns.values()]
        del row[label]
        try:
            if other is None:
                return judge(reward_fn, row, texts[0]).is_success
            first, second = (each.reward for each in judge_group(reward_fn, row, texts))
        except EnvironmentFailure as failure:
            return f"row {index}: {failure}"
        return first > second if first != second else f"row {index}: it finds both equally good."

    counts, failures = Counter[tuple[bool, bool]](), list[str]()
    for given, found in zip(labels, graded(verdict, range(len(rows)), reward_fn), strict=True):
        if isinstance(found, str):
            failures.append(found)
        else:
            counts[given, found] += 1
    return Agreement(counts, failures)


def _label(row: dict[str, object], columns: dict[str, str], label: str, index: int) -> bool:
    for option, name in (columns | {"--label": label}).items():
        if name not in row:
            raise DatasetError(
                f"Row {index} has no {name!r} (its columns: {', '.join(row)}): name it with {option}."
            )
    for name in columns.values():
        if not isinstance(row[name], str):
            raise DatasetError(f"Row {index}: {name}={row[name]!r:.90} is no text.")
    text = str(row[label]).lower()  # a CSV file has texts
    if text not in LABELS:
        raise DatasetError(f"Row {index}: {label}={text:.90} has to be true or false.")
    return LABELS[text]


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = command_parser("environments.agreement", __doc__)
    options.add_argument("judge", metavar="MODULE:NAME", help="a Judge, or another reward function")
    options.add_argument("--labels", type=Path, required=True, help="a .jsonl, .json, .csv or .parquet file")
    options.add_argument("--answer", default="response", help="column of the answers (default: %(default)s)")
    options.add_argument("--other", help="column of other answers: the labels say if the first is better")
    options.add_argument("--label", default="label", help="column of the labels (default: %(default)s)")
    given = options.parse_args(arguments)
    reward_fn = load_function(given.judge, given.judge)
    found = agreement(reward_fn, Dataset.load_data(given.labels), given.answer, given.label, given.other)
    sys.stdout.write(f"{given.judge} beside the labels of {given.labels}:\n{found}\n")
    if isinstance(reward_fn, Judge | GroupJudge):
        sys.stdout.write("The ledger has {} calls and {} tokens.\n".format(*reward_fn.ledger.spent))
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
