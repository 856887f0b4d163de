"""A rank that is killed or stopped ends the calls of the learner with an error of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from actors.learning import learner_group
from actors.learning import ranks as rank_actors
from actors.learning.learner_calls import PolicyCalls
from actors.learning.learner_group import LearnerGroup
from actors.learning.ranks import RankWorker
from actors.weights.store import PublishedWeights
from environments.disk import FileDigest
from environments.errors import ConfigError, LearnerError, LearnerLostError
from policies.learning.settings import LearnerConfig, OptimizerConfig

RISING = OptimizerConfig(lr=1e-3, warmup_steps=10)


@pytest.mark.slow
def test_weights_published_in_another_form_rebuild_no_learner(verl_on_cpu: None) -> None:
    """Experts are published one by one, and held as one: the run goes on from its checkpoint, as it would
    where the learner was lost for another reason.
    """
    import torch

    from actors.learning.publishing_learner import FetchedWeights
    from policies.engines.weights import pack
    from policies.learning.verl.weights import fill

    experts = torch.rand(2, 3, 4)
    fetched = FetchedWeights()
    published = [("norm.weight", torch.ones(3)), *((f"experts.{i}.weight", experts[i]) for i in range(2))]
    asyncio.run(fetched.load_weights(7, list(pack(published))))
    held = {"norm.weight": torch.zeros(3)}
    fill(held, fetched.tensor)
    assert held["norm.weight"].tolist() == [1, 1, 1]
    with pytest.raises(LearnerLostError, match=r"lack 'experts\.weight': they make no learner"):
        fill({"experts.weight": torch.zeros(2, 3, 4)}, fetched.tensor)


@pytest.mark.slow
def test_rank_takes_published_weights_over(process_group: None) -> None:
    import torch

    from actors.learning.publishing_learner import PublishingLearner
    from policies.engines.weights import pack

    async def fetch(transport: None, engine: Any) -> None:
        await engine.load_weights(7, list(pack([("weight", torch.ones(2, 3)), ("bias", torch.ones(2))])))

    rank: Any = PublishingLearner.__new__(PublishingLearner)
    rank._transport = None
    rank.engine = SimpleNamespace(module=torch.nn.Linear(3, 2))
    rank.model_config = SimpleNamespace(hf_config=SimpleNamespace(tie_word_embeddings=False))
    rank.take_over(SimpleNamespace(fetch=fetch), {})
    assert all(torch.equal(each, torch.ones_like(each)) for each in rank.engine.module.parameters())


def packed(tensors: Iterable[tuple[str, Any]], dtype: Any) -> dict[str, Any]:
    from policies.engines.weights import WholeTensors, pack

    return dict(WholeTensors(list(pack(tensors, dtype))))


def test_weights_travel_in_the_dtype_of_the_engines() -> None:
    import torch

    exact = torch.tensor([[1.0, 1 / 3]], requires_grad=True)
    tensors = [("linear.weight", exact), ("ids", torch.tensor([7])), ("half.weight", exact.half())]
    there = packed(tensors, torch.bfloat16)
    assert [each.dtype for each in there.values()] == [torch.bfloat16, torch.int64, torch.float16]
    bias = [("gate.e_score_correction_bias", exact[0])]
    assert torch.equal(packed(bias, torch.bfloat16)[bias[0][0]], exact[0]), "float32 in engines too"
    assert torch.equal(there["linear.weight"], exact.bfloat16()), "rounded as an engine does that loads them"
    for dtype in (torch.float32, None):
        there = packed(tensors, dtype)
        assert all(torch.equal(there[name], tensor) for name, tensor in tensors)


def test_later_copies_of_weights_take_the_memory_of_the_first(verl_on_cpu: None) -> None:
    import torch

    from actors.learning.publishing_learner import PublishingLearner
    from actors.weights.transport import ObjectStoreTransport
    from policies.engines.weights import WholeTensors

    class Learner(PublishingLearner):
        rank = 0

        def __init__(self) -> None:
            self._transport, self._dtype, self._copy = ObjectStoreTransport(), torch.bfloat16, []
            self.present = {"matrix": torch.rand(3, 5), "vector": torch.rand(4), "scalar": torch.tensor(1.5)}

        def weights(self) -> Iterator[tuple[str, Any]]:
            return iter(self.present.items())

        def schedule(self) -> dict[str, Any]:
            return {"last_epoch": 3}

    learner, places = Learner(), set()
    for version in range(3):
        learner.present["matrix"] += 1 / 3
        assert learner.begin_publish() == {"last_epoch": 3}
        published = WholeTensors(list(learner.publish_weights(version)))
        assert torch.equal(published["matrix"], learner.present["matrix"].bfloat16())
        assert published["scalar"] == 1.5
        places.add(published["matrix"].data_ptr())
    assert len(places) == 1


class RankOfAList(RankWorker):
    def _load(self, **_: Any) -> Any:
        return SimpleNamespace(pieces=lambda: ["first", "second"])


def test_stream_of_a_list_takes_what_ray_sends() -> None:
    rank = RankOfAList(None)
    rank._model = rank._load()
    stream: Any = rank.stream("pieces")
    assert (next(stream), stream.send(0.5)) == ("first", "second")
    rank.end_stream()


def test_save_given_up_takes_no_copy_of_the_next() -> None:
    """Another rank has failed in the first save, whose write still waits for its turn on this rank."""

    def copy_of(folder: str) -> Callable[[], dict[str, FileDigest]]:
        return lambda: {folder: FileDigest(num_bytes=1, sha256="")}

    rank = RankOfAList(None)
    rank._model = SimpleNamespace(begin_save=copy_of)  # type: ignore[assignment]
    for folder in ("first", "second"):
        rank.begin_save(folder)
    with pytest.raises(LearnerError, match="first is written no more: another save has begun"):
        rank.write("first")
    assert rank.write("second").keys() == {"second"}


class Ranks:
    """Stand-ins for the ranks: the schedule is where the last publish was."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._copied = 0

    def start_anew(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None: ...

    def check_ranks(self) -> None: ...

    def raise_if_dead(self) -> None: ...

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        self.calls.append((method.__name__, *args))
        self._copied += method is PolicyCalls.begin_publish
        return {"last_epoch": self._copied} if method is PolicyCalls.begin_publish else None

    def stream(self, method: Callable[..., Any], version: int) -> list[str]:
        assert method is PolicyCalls.publish_weights
        assert version == self._copied
        return [f"piece of {version}"]


class StoreOfOneVersion:
    """Takes the first version; a rank dies while it takes the second."""

    def __init__(self) -> None:
        self.published: PublishedWeights | None = None
        self.publish, self.newest = SimpleNamespace(remote=self._take), SimpleNamespace(remote=self._tell)

    def _take(self, version: int, pieces: list[Any]) -> None:
        if self.published is not None:
            raise LearnerLostError("A learner rank has died.")
        self.published = PublishedWeights(version, pieces)

    def _tell(self) -> PublishedWeights | None:
        return self.published


def test_wait_for_a_place_that_no_node_has_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_actors.RankGroup, "_start", lambda group: None)
    places: Any = SimpleNamespace(wait=lambda seconds: False)
    group = rank_actors.RankGroup(RankWorker, places, LearnerConfig(), learner=LearnerConfig())
    group._ranks = []
    with pytest.raises(LearnerLostError, match="lost with its node, and no other has room"):
        group.start_anew(LearnerConfig().optimizer, 10)


@pytest.mark.parametrize("deaths", [1, 2])
def test_rank_on_a_node_whose_death_is_unknown_starts_again(
    monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    starts, lost = [], [LearnerLostError("A learner rank has died.")] * deaths

    def wait_for(group: Any, references: list[Any]) -> None:
        if len(starts) > 1 and lost:  # the first are those of the beginning
            raise lost.pop()

    monkeypatch.setattr(rank_actors.RankGroup, "_start", lambda group: starts.append(group))
    monkeypatch.setattr(rank_actors.RankGroup, "_wait_for", wait_for)
    places: Any = SimpleNamespace(wait=lambda seconds: True)
    group = rank_actors.RankGroup(RankWorker, places, LearnerConfig(), learner=LearnerConfig())
    group._ranks = []
    with pytest.raises(LearnerLostError) if deaths == 2 else nullcontext():
        group.start_anew(LearnerConfig().optimizer, 10)
    assert len(starts) == 3 and not lost


def test_places_are_given_back_where_ctrl_c_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    given_back: list[Any] = []
    places = SimpleNamespace(ready=interrupted)
    monkeypatch.setattr(rank_actors, "placement_group", lambda *_, **__: places)
    monkeypatch.setattr(rank_actors.ray.util, "remove_placement_group", given_back.append)
    with pytest.raises(KeyboardInterrupt):
        rank_actors.create_placement_group(LearnerConfig())
    assert given_back == [places]


def group_of(ranks: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> LearnerGroup:
    monkeypatch.setattr(learner_group.ray, "get", lambda answer: answer)
    group = LearnerGroup.__new__(LearnerGroup)
    group._policy, group._groups, group._store, group._schedule = ranks, [ranks], store, {}
    group._critic = group._publish = None
    return group


def test_full_disk_of_a_store_is_no_loss_of_a_busy_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that learns beside the publish does not answer a call for minutes."""

    class BusyRanks(Ranks):
        def check_ranks(self) -> None:
            raise LearnerLostError("A learner rank did not answer for 60 s.")

    def take(version: int, pieces: list[Any]) -> None:
        raise RayTaskError("publish", "make room", ConfigError("make room"))

    store = SimpleNamespace(publish=SimpleNamespace(remote=take))
    group = group_of(BusyRanks(), store, monkeypatch)
    group.publish(1)
    with pytest.raises(RayTaskError, match="make room"):
        group.finish_publish()


def test_check_while_rollouts_are_waited_for_awaits_no_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = threading.Event()

    def take(version: int, pieces: list[Any]) -> None:
        is_there.wait()
        raise ConfigError("make room")

    group = group_of(Ranks(), SimpleNamespace(publish=SimpleNamespace(remote=take)), monkeypatch)
    group.publish(1)
    group.check_ranks()
    is_there.set()
    with pytest.raises(ConfigError, match="make room"):
        group.finish_publish()
    with pytest.raises(ConfigError, match="make room"):
        group.check_ranks()


def test_learner_goes_on_from_no_version_before_its_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was lost on its way is counted as published."""
    ranks = Ranks()
    group = group_of(ranks, StoreOfOneVersion(), monkeypatch)
    group.publish(1)
    assert group.rebuild(RISING, 100, "checkpoint") == 1
    assert ranks.calls[-1] == ("take_over", PublishedWeights(1, ["piece of 1"]), {"last_epoch": 1})
    group.publish(2)
    with pytest.raises(LearnerLostError, match="has died"):
        group.finish_publish()
    with pytest.raises(LearnerLostError, match="lost before its newest weights were there"):
        group.rebuild(RISING, 100, "checkpoint")
