"""``python -m launch.replay runs/a --update 12``: compute an update of a run again, and change it.

    python -m launch.replay runs/a --update 12                               the update as it was, bit for bit
    python -m launch.replay runs/a --update 12 algorithm.name=dr_grpo        with another algorithm
    python -m launch.replay runs/a --update 12 --reward my_rewards:strict    with other rewards
    python -m launch.replay runs/a --update 12 --without 93                  without the group 00000093

It begins with the nearest checkpoint before the update, takes the rollouts that the run has kept since then,
and compares every number, and the weights where the run has a checkpoint of that update. What is not the same
to the last bit is named. With a change it shows beside that what would have come of the update: its loss, the
norm of its gradient, and each group's share of it.

The learner has the run's settings. No engine is started, no environment, and nothing of the run is changed:
a folder .replay_* in it holds states of the learner and is deleted in the end. The exit status is 1 where
something differs from what was recorded.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

from actors.learning.learners import Learners
from environments.command_name import command_parser, explained
from launch.run_folder.lock import writing_to
from launch.settings.tree import TrainConfig
from launch.training.past_run import Beginning, PastRun, stage_of_next_update
from launch.training.recomputation import (
    Recomputation,
    Recomputed,
    number_differences,
    started_learner,
    weight_differences,
)
from launch.training.stages.base import Stage
from launch.training.stages.chosen import chosen_stages
from launch.training.update_change import SECTIONS, Change
from launch.validation.policies import check_turns

MOST_NAMED = 5
"""Differences that are named; the others are counted."""
NUMBERS = {
    "learn/loss": "loss",
    "learn/grad_norm": "norm of the gradient",
    "learn/advantage_std": "spread of the advantages",
    "learn/clip_fraction": "clipped share",
}
"""Metrics of an update in the table, and what they are called there."""
ROUNDING = (
    "Another number of threads (learner.num_threads) or another processor changes the last bits of a sum."
)

StartLearner = Callable[[PastRun, TrainConfig, Stage], AbstractContextManager[Learners]]


@dataclass(frozen=True)
class ReplayedUpdate:
    """An update that was computed again, as it was and with a change, if there is one."""

    is_same: bool
    """True if it came out as it was recorded, with all updates since the state that it began from."""
    as_it_was: Recomputed
    changed: Recomputed | None


@dataclass(frozen=True)
class Replay:
    """Computes updates of a run again.

    Args:
        run: the past run.
        scratch: an empty folder for states of the learner, which all its ranks can reach.
        start_learner: starts the learner of a configuration.
        write: prints a line.
    """

    run: PastRun
    scratch: Path
    start_learner: StartLearner
    write: Callable[[str], None]

    def replay(self, update: int, change: Change) -> ReplayedUpdate:
        """Compute ``update`` again, as it was and with ``change``.

        Raises:
            TroupeError: the run has not kept what that takes, or the change cannot be made.
        """
        run, beginning = self.run, self.run.beginning_before(update)
        config = change.config(run)
        groups = change.groups(run.groups(update))
        check_turns(groups)
        count = update - beginning.progress.step
        self.write(f"Update {update} of {run.folder}: {count} update{'s' * (count > 1)} from {beginning} on.")
        with ExitStack() as ending:
            stage = stage_of_next_update(chosen_stages(run.config), beginning.progress)
            learner = ending.enter_context(self.start_learner(run, run.config, stage))
            past = Recomputation(run.config, learner, beginning.progress, beginning.checkpoint)
            are_same = []
            for earlier in range(past.progress.step + 1, update):
                past.begin_stage()
                are_same.append(self._compare(earlier, past.update(run.groups(earlier))))
            has_begun = past.begin_stage()
            state = None if change.is_none else self._state(past, beginning, has_begun)
            progress = deepcopy(past.progress)
            as_it_was = past.update(run.groups(update), state)
            are_same += [self._compare(update, as_it_was), self._compare_weights(update, learner)]
            if state is None:
                return ReplayedUpdate(all(are_same), as_it_was, None)
            if change.overrides:
                ending.close()  # before the next one starts, which may need its place
                stage = stage_of_next_update(chosen_stages(config), progress)
                learner = ending.enter_context(self.start_learner(run, config, stage))
            changed = Recomputation(config, learner, progress, state).update(groups, state)
        self.write(table(f"With {change}:", as_it_was, changed))
        return ReplayedUpdate(all(are_same), as_it_was, changed)

    def _state(self, past: Recomputation, beginning: Beginning, has_begun: bool) -> Path:
        """A folder with the state of the learner now, from which an update is made several times."""
        if beginning.checkpoint is not None and past.progress == beginning.progress and not has_begun:
            return beginning.checkpoint
        return self._saved(past.learner, "before")

    def _saved(self, learner: Learners, name: str) -> Path:
        folder = self.scratch / name
        folder.mkdir()
        learner.begin_save(str(folder))()
        return folder

    def _compare(self, update: int, computed: Recomputed) -> bool:
        """Compare an update's numbers with those that the run has recorded; return whether they are so."""
        recorded = self.run.metrics(update)
        if not recorded:
            self.write(f"unknown  update {update}: the run has recorded no metrics of it")
            return False
        found = number_differences(recorded, computed.metrics)
        return self._report(f"update {update}: {len(computed.metrics)} numbers", found)

    def _compare_weights(self, update: int, learner: Learners) -> bool:
        """Compare the weights after an update with those of the run's checkpoint, if there is one."""
        checkpoint = self.run.checkpoint_of(update)
        if checkpoint is None:
            return True
        found = weight_differences(checkpoint, self._saved(learner, "after"))
        return self._report(f"update {update}: the weights of its checkpoint", found)

    def _report(self, what: str, differences: Sequence[str]) -> bool:
        """Write whether ``what`` came out as it was; return it."""
        if not differences:
            self.write(f"same     {what}, to the last bit")
            return True
        self.write(f"DIFFERS  {what}: {len(differences)} are others. {ROUNDING}")
        for each in differences[:MOST_NAMED]:
            self.write(f"         {each}")
        if len(differences) > MOST_NAMED:
            self.write(f"         and {len(differences) - MOST_NAMED} more")
        return False


def table(title: str, as_it_was: Recomputed, changed: Recomputed) -> str:
    """Table of an update as it was and with a change."""
    rows = [(title, "as it was", "changed")]
    for name, label in NUMBERS.items():
        rows.append((label, _number_cell(name, as_it_was), _number_cell(name, changed)))
    for group_id in sorted({each.group_id for each in as_it_was.selection.taken + changed.selection.taken}):
        rows.append((f"group {group_id}", _group_cell(group_id, as_it_was), _group_cell(group_id, changed)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {before:>{widths[1]}}  {now:>{widths[2]}}" for name, before, now in rows
    )


def _number_cell(name: str, update: Recomputed) -> str:
    return f"{update.metrics[name]:.6g}" if name in update.metrics else "-"


def _group_cell(group_id: str, update: Recomputed) -> str:
    """Reward of a group, and the norm and the share of its gradient."""
    group = next((each for each in update.selection.taken if each.group_id == group_id), None)
    if group is None:
        return "left out"
    reward = sum(each.reward for each in group.trajectories) / len(group.trajectories)
    if group_id not in update.gradients:
        return f"reward {reward:.3f}, not learned from"
    norm, whole = update.gradients[group_id], sum(update.gradients.values())
    return f"reward {reward:.3f}, gradient {norm:.4g} ({norm / whole if whole else 0:.0%})"


# -- the command ---------------------------------------------------------------------------------------


@contextmanager
def scratch_folder(run: Path) -> Iterator[Path]:
    """A folder inside that of ``run``, which all ranks of a learner can reach. It ends with the block."""
    with writing_to(run):
        folder = tempfile.TemporaryDirectory(prefix=".replay_", dir=run)
    with folder as name:
        yield Path(name).resolve()


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 the same, 1 something differs, 2 for a printed reason."""
    parser = command_parser("replay", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run, its run.directory")
    parser.add_argument("--update", type=int, required=True, help="number of the update, from 1")
    parser.add_argument(
        "--reward",
        metavar="MODULE:FUNCTION",
        help="a reward function, as an environment's reward_fn, that grades the recorded answers anew",
    )
    parser.add_argument("--without", type=int, metavar="GROUP", help="number of a group that is left out")
    parser.add_argument(
        "settings", nargs="*", help=f"settings of {', '.join(SECTIONS)}, such as algorithm.name=dr_grpo"
    )
    options = parser.parse_intermixed_args(arguments)
    change = Change(overrides=options.settings, reward=options.reward, without=options.without)
    run = PastRun(options.run)
    from launch.cluster.session import connected  # it loads Serve

    with scratch_folder(options.run) as scratch, connected():
        replayed = Replay(run, scratch, started_learner, print).replay(options.update, change)
    return 0 if replayed.is_same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
