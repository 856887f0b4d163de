"""Pictures in messages: bounds, their tokens in prompts, and what is learned beside them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from picture_models import EDGE, PLACE, TILES, WHOLE, ColourEnvironment, build, picture, shown
from PIL import Image
from pydantic import ValidationError
from recording_engine import RecordingEngine
from scripted_engine import ScriptedEngine

from environments import turns
from environments.errors import AgentError, ConfigError, DatasetError
from environments.steps import Step
from environments.turns import Turns, steps_of
from environments.types import Completion, TerminationReason, Trajectory
from policies import pictures
from policies.agents.game import GameAgent
from policies.agents.tool import ToolAgent
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.demonstrations import check_demonstrations
from policies.learning.division import Division
from policies.learning.samples import TrainBatch, training_samples
from policies.model_api.errors import InvalidRequestError, RequestError, request_error
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.protocol import ChatRequest
from policies.pictures import BLANK, OPENED_BYTES, PICTURE_BYTES, open_picture, pictures_of
from policies.sampler import SampleRequest, SamplingParams, Turn
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

NUM_PLACES = 20
"""Tokens that stand for a picture in the tiny model: four in each tile, and of the whole."""
RED, BLUE = picture("red"), picture("blue")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(build(tmp_path_factory.mktemp("llava"), has_weights=False)))


def place(renderer: ChatRenderer) -> int:
    return renderer.encode(PLACE)[0]


def answered(renderer: ChatRenderer, agent: GameAgent, past: Turn | None, text: str) -> Completion:
    """An answer to what an agent shows next."""
    messages = agent.chat_completions
    request = SampleRequest(messages=messages, previous=past)
    ids = (*renderer.encode(text), renderer.eos_token_id)
    return Completion(
        prompt_ids=renderer.request_ids(request),
        completion_ids=ids,
        logprobs=(-1.0,) * len(ids),
        text=text,
        finish_reason="stop",
        pictures=pictures_of(messages),
    )


def played(renderer: ChatRenderer, colour: str = "red") -> Trajectory:
    """Two turns of ``ColourEnvironment``, each about a picture; the first answer is wrong."""
    environment, agent = ColourEnvironment(colour), GameAgent()
    observation, info = environment.reset()
    reward, done, past = 0.0, False, None
    for text in ("green?", colour):
        agent.update_from_env(observation=observation, reward=reward, done=done, info=info)
        completion, shown_now = answered(renderer, agent, past, text), observation
        past = Turn(messages=agent.chat_completions, completion=completion)
        action = agent.update_from_model(text).action
        observation, reward, done, info = environment.step(action)
        step = agent.trajectory.steps[-1]
        step.completion, step.reward, step.observation = completion, reward, shown_now
    trajectory = agent.trajectory
    trajectory.termination_reason = TerminationReason.ENV_DONE
    return trajectory


def test_prompt_has_the_tokens_of_each_picture_at_its_place(renderer: ChatRenderer) -> None:
    messages = [shown(RED, BLUE), {"role": "assistant", "content": "red"}, shown(RED, text="And this?")]
    ids = renderer.prompt_ids(messages)
    rows = ["".join(f"{EDGE}{tile}{PLACE * 4}" for tile in row) + "\n" for row in (TILES[:2], TILES[2:])]
    one = f"{''.join(rows)}\n{EDGE}{WHOLE}{PLACE * 4}{EDGE}"
    expected = (
        f"<|im_start|>user\n{one}{one}Which colour is it?<|im_end|>\n<|im_start|>assistant\n"
        f"red<|im_end|>\n<|im_start|>user\n{one}And this?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == renderer.encode(expected)
    assert pictures_of(messages) == (RED, BLUE, RED)


def test_prompt_is_that_of_the_processor_itself(renderer: ChatRenderer) -> None:
    reader = renderer.pictures
    assert reader is not None
    text = f"<|im_start|>user\n{PLACE}Which colour is it?<|im_end|>\n<|im_start|>assistant\n"
    made = reader.processor(images=[open_picture(RED)], text=text, add_special_tokens=False)
    ids = renderer.prompt_ids([shown(RED)])
    assert ids == made["input_ids"][0]
    assert reader.collapsed(ids, [RED]) == renderer.encode(text), "as vLLM takes it"


def test_second_turn_extends_the_ids_of_the_first(renderer: ChatRenderer) -> None:
    first, second = played(renderer).completions
    assert second.extends(first)
    assert second.pictures == (RED, picture("green"))
    assert second.prompt_ids.count(place(renderer)) == 2 * NUM_PLACES


def test_history_with_another_picture_is_no_continuation(renderer: ChatRenderer) -> None:
    """Its text and its ids are the same."""
    red, blue = played(renderer).completions, played(renderer, "blue").completions
    assert red[0].prompt_ids == blue[0].prompt_ids
    assert not blue[1].extends(red[0])
    past = Turn(messages=[shown(RED)], completion=red[0])
    later = [shown(BLUE), {"role": "assistant", "content": red[0].text}, shown(text="And?")]
    assert (
        renderer._extend(past, renderer.template.render(*renderer._split(later)[:1], None), (BLUE,)) is None
    )


def test_mask_leaves_out_all_tokens_of_pictures(renderer: ChatRenderer) -> None:
    [sample] = training_samples(played(renderer))
    ids, mask = sample.response_ids, sample.loss_mask
    assert sample.pictures == (RED, picture("green"))
    assert ids.count(place(renderer)) == NUM_PLACES, "the other picture is in the prompt"
    assert not any(bit for token, bit in zip(ids, mask, strict=True) if token == place(renderer))
    assert sum(mask) == sum(each.num_completion_tokens for each in played(renderer).completions)


def test_trajectory_holds_each_picture_once(renderer: ChatRenderer) -> None:
    steps = played(renderer).steps
    columns = Turns.of(steps)
    for written in (columns.json(), pickle.dumps(columns)):
        assert written.count(RED.encode()) == written.count(picture("green").encode()) == 1
    for read in (columns.steps(), steps_of(json.loads(columns.json()))):
        assert read == steps


def test_picture_that_no_message_holds_is_written_itself(renderer: ChatRenderer) -> None:
    [first, *_] = played(renderer).completions
    steps = [Step(completion=first)]
    assert Turns.of(steps).steps() == steps


def test_list_of_numbers_is_written_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of it takes longer than all the rest of its turn."""
    steps = [Step(chat_completions=[{"role": "user", "content": "now"}], observation=[1, 2.5])]
    monkeypatch.delattr(turns, "json_key")
    assert Turns.of(steps).steps() == steps


def test_rows_with_pictures_share_no_tokens(renderer: ChatRenderer) -> None:
    samples = tuple(training_samples(played(renderer, colour))[0] for colour in ("red", "blue", "red"))
    batch = TrainBatch(samples=samples)
    [[shard]] = Division([batch], 1, 4096, 384).shards([batch], [])
    assert [len(row) for row in shard.rows] == [1, 1, 1]
    whole = shard.with_ids(Division([batch], 1, 4096, 384).ids(0))
    assert [each.pictures[0] for each in whole.samples] == [RED, BLUE, RED]
    assert not any(each.pictures for each in shard.samples), "sent once, with the ids"


def test_pictures_of_another_rank_are_known(renderer: ChatRenderer) -> None:
    batch = TrainBatch(samples=tuple(training_samples(played(renderer))))
    with_and_without = Division([batch], 2, 4096, 384).shards([batch], [])
    assert [[shard.has_pictures for shard in own] for own in with_and_without] == [[True], [True]]
    assert open_picture(BLANK).size == (8, 8)


def test_name_of_the_token_in_a_text_stays_text(renderer: ChatRenderer) -> None:
    ids = renderer.prompt_ids([shown(RED, text=f"{PLACE} is no picture")])
    assert ids.count(place(renderer)) == NUM_PLACES
    assert f"{PLACE} is no picture" in renderer.text_of(ids)


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_name_of_the_token_is_text_in_each_role(renderer: ChatRenderer, role: str) -> None:
    """A model may write it by other tokens than that one."""
    messages = [shown(RED), {"role": role, "content": f"an {PLACE}"}, shown(text="And?")]
    ids = renderer.request_ids(SampleRequest(messages=messages))
    assert ids.count(place(renderer)) == NUM_PLACES
    assert f"an {PLACE}<|im_end|>" in renderer.text_of(ids)


def test_demonstration_with_a_picture_is_refused(renderer: ChatRenderer) -> None:
    messages = [shown(RED), {"role": "assistant", "content": "red"}]
    with pytest.raises(DatasetError, match="pictures are learned from where a policy plays"):
        check_demonstrations(renderer, [messages])


def test_template_that_writes_no_picture_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(build(tmp_path, has_weights=False))
    tokenizer.chat_template = tokenizer.chat_template.replace(PLACE, "")
    with pytest.raises(AgentError, match="1 pictures are shown as 0 <image>"):
        ChatRenderer(tokenizer).request_ids(SampleRequest(messages=[shown(RED)]))


def png(width: int, height: int) -> str:
    """The beginning of a PNG of this size: no pixel of it is there."""
    header = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + bytes((8, 2, 0, 0, 0))
    content = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4) + header + zlib.crc32(header).to_bytes(4)
    content += (8).to_bytes(4) + b"IDAT"
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://localhost/red.png", "no address is fetched"),
        ("file:///etc/passwd", "no address is fetched"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "no address is fetched"),
        ("data:image/png;base64," + "A" * (PICTURE_BYTES * 4 // 3 + 4), f"may have {PICTURE_BYTES}"),
        (png(20_000, 4_000), "20000 x 4000 pixels"),
        (png(2048, 100), "2048 x 100 pixels"),
        (png(4, 40), "4 x 40 pixels"),
        (png(64, 64), "cannot be read"),
        ("data:image/png;base64,%%%", "cannot be read"),
        (picture("red", kind="gif").replace("image/gif", "image/png"), "cannot be read"),
    ],
)
def test_other_address_or_size_is_refused(renderer: ChatRenderer, address: str, reason: str) -> None:
    with pytest.raises(AgentError, match=reason):
        renderer.request_ids(SampleRequest(messages=[shown(address)]))


def test_jpeg_is_a_picture_too(renderer: ChatRenderer) -> None:
    ids = renderer.prompt_ids([shown(picture("red", kind="jpeg"))])
    assert ids == renderer.prompt_ids([shown(RED)])


class SeeingEngine(ScriptedEngine):
    """Notes what it is shown."""

    takes_pictures = True

    async def sample(self, prompt_ids: Any, params: Any, in_pieces: bool, pictures: Any = ()) -> Any:
        self.shown = prompt_ids, pictures
        async for output in super().sample(prompt_ids, params, in_pieces):
            yield output


def answer_of(frontend: OpenAIFrontend, **body: Any) -> Any:
    return asyncio.run(anext(frontend.chat(ChatRequest.model_validate({"model": "tiny", **body}))))


@pytest.fixture
def seeing(renderer: ChatRenderer) -> tuple[OpenAIFrontend, SeeingEngine]:
    config = EngineConfig(name=SeeingEngine.__name__, options={"replies": ["red"]}, max_model_tokens=512)
    engine = SeeingEngine(renderer._tokenizer.name_or_path, config, {})
    return OpenAIFrontend("tiny", renderer, engine), engine


def test_picture_of_a_client_is_that_of_a_rollout(
    renderer: ChatRenderer, seeing: tuple[OpenAIFrontend, SeeingEngine]
) -> None:
    frontend, engine = seeing
    answer = answer_of(frontend, messages=[shown(RED)])
    assert answer["choices"][0]["message"]["content"] == "red"
    prompt = renderer.request_ids(SampleRequest(messages=[shown(RED)]))
    assert engine.shown == (tuple(prompt), (RED,))
    assert answer["usage"]["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("message", "fields", "sentence"),
    [
        (shown("https://example.org/a.png"), {}, "https://example.org/a.png' .* no address is fetched"),
        (shown("data:image/png;base64,AAAA"), {}, "A message is refused: the picture .* cannot be read"),
        ({**shown(RED), "role": "system"}, {}, "messages.0: a system message shows no pictures"),
        (shown(RED), {"continue_final_message": True}, "An answer about pictures is not gone on with"),
        (shown(*[RED] * 17), {}, "17 pictures are more than 16: leave the earlier ones out"),
    ],
)
def test_picture_of_a_client_that_is_not_taken_is_named(
    seeing: tuple[OpenAIFrontend, SeeingEngine], message: Any, fields: dict[str, Any], sentence: str
) -> None:
    answer = [{"role": "assistant", "content": "r"}] if fields else []
    with pytest.raises((RequestError, ValidationError)) as caught:
        answer_of(seeing[0], messages=[message, *answer], add_generation_prompt=not fields, **fields)
    assert re.search(sentence, request_error(caught.value).message)


def test_picture_for_a_model_of_text_is_refused() -> None:
    frontend = OpenAIFrontend("tiny", ChatRenderer(build_tokenizer([[shown(text="a")]])), RecordingEngine())
    with pytest.raises(InvalidRequestError, match="This model reads text only, and a message shows"):
        answer_of(frontend, messages=[shown(RED)])


@pytest.mark.parametrize("address", [["a"], {"url": "a"}, 5])
def test_address_that_is_no_text_is_refused(renderer: ChatRenderer, address: Any) -> None:
    with pytest.raises(AgentError, match="no address is fetched"):
        renderer.request_ids(SampleRequest(messages=[shown(address)]))


def encoded(image: Image.Image, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def test_picture_of_16_bits_is_refused_as_it_would_be_white() -> None:
    with pytest.raises(ValueError, match="of mode I;16"):
        open_picture(encoded(Image.new("I;16", (64, 64), 4000), "png"))


def test_picture_of_a_turned_camera_is_turned_back() -> None:
    exif = Image.Exif()
    exif[274] = 6
    assert open_picture(encoded(Image.new("RGB", (64, 32)), "jpeg", exif=exif)).size == (32, 64)


def test_open_pictures_are_held_up_to_their_bytes() -> None:
    for shade in range(12):
        image = open_picture(encoded(Image.new("RGB", (2048, 2048), (shade, 0, 0)), "jpeg"))
    assert OPENED_BYTES // 4 < pictures._OPENED.num_bytes <= OPENED_BYTES < 12 * len(image.tobytes())


def test_large_pictures_are_opened_once_for_the_prompt(
    monkeypatch: pytest.MonkeyPatch, renderer: ChatRenderer
) -> None:
    """All together do not fit among those that are held open."""
    opened: list[str] = []
    whole = pictures._open
    monkeypatch.setattr(pictures, "_open", lambda picture: opened.append(picture) or whole(picture))
    own = [encoded(Image.new("RGB", (2048, 1536), (shade, 7, 0)), "png") for shade in range(8)]
    messages = [shown(*own)]
    assert pictures_of(messages) == tuple(own)
    renderer.prompt_ids(messages)
    assert sorted(opened) in (sorted(own), sorted([*own, own[0]])), "one more for the tokens of its size"


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_orientation_among_fields_of_other_types_is_refused(kind: str) -> None:
    """As a text in the place of the height: PIL cannot write the fields anew without the orientation."""
    fields = b"MM\0*\0\0\0\x08\0\x02\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\x01\x01\0\x02\0\0\0\x04abc\0\0\0\0\0"
    with pytest.raises(ValueError, match=r"cannot be read .*: write it again"):
        open_picture(encoded(Image.new("RGB", (64, 32)), kind, exif=b"Exif\0\0" + fields))


@pytest.mark.parametrize("agent", [GameAgent, ToolAgent])
def test_agent_shows_parts_and_the_text_of_another_list(agent: type[GameAgent | ToolAgent]) -> None:
    parts, cells = shown(RED)["content"], [{"type": "wall"}, 3]
    for observation, content in ((parts, parts), (cells, str(cells)), ([1, 2], "[1, 2]")):
        played = agent()
        played.update_from_env(observation=observation, reward=0.0, done=False, info={})
        assert played.chat_completions[-1] == {"role": "user", "content": content}
        assert played.chat_completions[-1]["content"] is not observation


def test_part_of_another_type_is_refused_beside_a_picture(renderer: ChatRenderer) -> None:
    message = shown(RED)
    message["content"].append({"type": "image"})
    with pytest.raises(AgentError, match="is no text that this model reads"):
        renderer.request_ids(SampleRequest(messages=[message]))


async def test_engine_that_takes_no_pictures_refuses_them(renderer: ChatRenderer) -> None:
    config = EngineConfig(options={"replies": ["red"]})
    engine = ScriptedEngine(renderer._tokenizer.name_or_path, config, {})
    prompt_ids = renderer.prompt_ids([shown(RED)])
    with pytest.raises(ConfigError, match="ScriptedEngine takes no pictures"):
        await engine.generate(prompt_ids, SamplingParams(), (RED,))


def test_model_without_its_processor_reads_text_only(tmp_path: Path) -> None:
    (build(tmp_path, has_weights=False) / "processor_config.json").unlink()
    with pytest.raises(AgentError, match="is no text that this model reads"):
        ChatRenderer(load_tokenizer(tmp_path)).request_ids(SampleRequest(messages=[shown(RED)]))
