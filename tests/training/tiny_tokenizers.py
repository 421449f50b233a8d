"""Tokenizers of a few dozen tokens with chat templates of the known families, and their ids by hand."""

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTROLS = ("<|bos|>", "<|pad|>", "<|start|>", "<|end|>", "[INST]", "[/INST]")
BOS, PAD, START, END, INST, CLOSE_INST = range(256, 262)

ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
TURN = "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
LOOP = "{% for message in messages %}" + TURN + "{% endfor %}"

PLAIN = LOOP + ASK
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|start|>system\nBe kind.<|end|>\n{% endif %}" + PLAIN
)  # As SmolLM2 and Qwen2.5.
WITH_BOS = "{{ bos_token }}" + PLAIN
TRIMMED = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message['role'] }}\n\n"
    "{{ message['content'] | trim }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n\n{% endif %}"
)  # As Llama 3.
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user, assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)  # As Mistral: nothing is written to ask for an answer.
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}<|start|>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)  # As Gemma.
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('no user turn') }}{% endif %}" + PLAIN
)
MARKED = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}<|end|>\n"
    "{% endfor %}" + ASK
)
FORGETFUL = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{% if loop.last or message['role'] == 'user' %}"
    "{{ message['content'] }}{% else %}{{ message['content'].split('</think>')[-1] }}{% endif %}<|end|>\n"
    "{% endfor %}" + ASK
)  # As Qwen3: thoughts of earlier turns are left out.
NO_STOP = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}{% endfor %}" + ASK
)  # As GLM-4: the opening of the next turn is where the model stops.
TOOLS = (
    "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}<|end|>\n"
    "{% endfor %}" + ASK
)


WRITTEN_OUT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}user {{ message['content'] }} bot"
    "{% else %} {{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)  # As Vicuna: plain words open a turn, right behind the stop token.


def make_tokenizer(
    template: str | None = PLAIN,
    *,
    adds_bos: bool = False,
    pad: str = "<|pad|>",
    bos: str | None = "<|bos|>",
    merges: tuple[tuple[str, str], ...] = (),
    unmarked: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """Id n is byte n; control tokens follow from 256 on, then merges, then added tokens that are not marked special."""
    letters = _letters()
    merged = ["".join(pair) for pair in merges]
    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    if merges:
        vocabulary = {**tokenizer.get_vocab(), **{token: 262 + at for at, token in enumerate(merged)}}
        tokenizer.model = models.BPE(vocab=vocabulary, merges=list(merges))
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in unmarked])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token="<|end|>", pad_token=pad, chat_template=template
    )


def make_spaced_tokenizer(scheme: str, template: str) -> PreTrainedTokenizerFast:
    """One that writes a space in front of what it encodes: of each section with "always", of a text with "first"."""
    letters = [*"abcdefghijklmnopqrstuvwxyz.▁", "\n", "▁b", "▁c"]
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[("▁", "b"), ("▁", "c")])
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROLS])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=template)


def ids_of(text: str) -> list[int]:
    """The ids of a text in which control tokens are meant, for a tokenizer without merges."""
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, CONTROLS)) + ")", text):
        ids += [256 + CONTROLS.index(piece)] if piece in CONTROLS else piece.encode()
    return ids


def labelled(*pieces: tuple[str, bool]) -> tuple[list[int], list[int]]:
    """Ids and labels of texts that carry loss or not."""
    ids = [token for text, _ in pieces for token in ids_of(text)]
    labels = [token if is_trained else -100 for text, is_trained in pieces for token in ids_of(text)]
    return ids, labels


def trained_texts(tokenizer: Any, example: Any) -> list[str]:
    """The text of each run of tokens that carry loss."""
    runs: list[list[int]] = [[]]
    for token, label in zip(example.input_ids, example.labels, strict=True):
        assert label in (token, -100)
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs if run]


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it is visible."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)]
