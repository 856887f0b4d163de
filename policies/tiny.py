"""Builds the quickstart's model: a small Qwen3 with random weights, and a tokenizer for its conversations.

A model of this size (353k parameters) was measured to learn small tasks on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from environments.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"
SPECIAL_TOKENS = (PAD_TOKEN, "<|im_start|>", EOS_TOKEN)
NUM_CONVERSATIONS = 1000
"""Demonstrations, the first ones, from which a run's tiny model has its tokens."""

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Sizes of the model, by their names in ``config.json``."""
VOCABULARY = 512
"""Most tokens of the tokenizer."""

TOOL_RESPONSE = "<tool_response>\n{}\n</tool_response>"

# ChatML without a default system prompt. It only ever appends, so the rendering of a conversation starts
# with the rendering of all its beginnings: a whole rollout is one token sequence. Tools and calls are written
# as ToolAgent with hermes-brief writes them, so a client's tool loop renders to the tokens of training.
CHAT_TEMPLATE = r"""
{%- set lines -%}
    {%- for tool in tools or [] -%}
        {%- set parameters = tool.function.parameters.properties or [] if tool.function.parameters else [] -%}
        {{- '' if loop.first else '\n' -}}
        {{- 'You can call ' + tool.function.name + '(' + parameters | join(', ') -}}
        {{- ') inside <tool_call></tool_call>.' -}}
    {%- endfor -%}
{%- endset -%}
{%- if lines and messages[0].role != 'system' -%}
    {{- '<|im_start|>system\n' + lines + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' -}}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\n' + message.content -}}
        {%- if loop.first and lines and message.role == 'system' -%}
            {{- ' ' + lines -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {{- '<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
"""


def build_tokenizer(conversations: Iterable[list[Message]]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with digits split one by one, trained on the conversations' texts.

    Encoding and decoding returns any text unchanged, also with characters that are new to it. Pairs that
    occur only once are not merged. The same conversations give the same tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE.strip(),
        clean_up_tokenization_spaces=False,
    )


def build_model(
    path: str | Path,
    conversations: Iterable[list[Message]],
    seed: int = 0,
    tie_word_embeddings: bool = True,
) -> Path:
    """Saves a fresh model and its tokenizer to the folder ``path``, which it returns, in Hugging Face format.

    The tokenizer is trained on ``conversations``. The same arguments give the same files, and the caller's
    random state stays as it was.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    tokenizer = build_tokenizer(conversations)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        **SIZES,
        max_position_embeddings=2048,
        # At the usual 0.02 so small a model learns to copy only much later.
        initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    folder = Path(path)
    disable_progress_bar()  # a bar for files that are written in a moment
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _texts(conversations: Iterable[list[Message]]) -> Iterator[str]:
    """The texts that the template puts between the special tokens."""
    for messages in conversations:
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool":
                role, content = "user", TOOL_RESPONSE.format(content)
            yield f"{role}\n{content}"
