"""Chat templates of published families, written after their public descriptions, with tokenizers.

Each is as its family's in what frames turns; what only fills in (dates, tools' prose) is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken

from keel.models.build import byte_tokenizer


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and which of them ends a sequence."""

    template: str
    special: tuple[str, ...]
    eos: str
    end_of_turn: str
    plain: tuple[str, ...] = ()
    """Tokens that are added, and not special."""
    strips: tuple[str, ...] = field(default=())
    """Special tokens that take the blanks on their right."""


CHATML = Family(
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "<|im_end|>",
    "<|im_end|>",
)
QWEN3 = Family(
    "{% set last = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought = '' %}{% set words = m.content %}"
    "{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set words = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > last.at and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ words }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
    ("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    "<|im_end|>",
    "<|im_end|>",
    ("<think>", "</think>"),
)
LLAMA3 = Family(
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "<|eot_id|>",
    "<|eot_id|>",
)
GEMMA = Family(
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "<eos>",
    "<end_of_turn>",
)
PHI3 = Family(
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    "<|endoftext|>",
    "<|end|>",
    strips=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
MISTRAL = Family(
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}"
    "[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    "</s>",
    "</s>",
)
DEEPSEEK = Family(
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% else %}<｜Assistant｜>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}",
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "<｜end▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
)
GPT_OSS = Family(
    "<|start|>system<|message|>Reasoning: low<|end|>{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m['content'] }}{% if loop.last and not add_generation_prompt %}<|return|>"
    "{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|endoftext|>"),
    "<|return|>",
    "<|return|>",
)
OPENED = Family(
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<reasoning>\n{% endif %}",
    ("<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
    "<|end|>",
    "<|end|>",
)
FAMILIES = {
    "chatml": CHATML,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "phi3": PHI3,
    "mistral": MISTRAL,
    "deepseek-r1": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "opened": OPENED,
}


@lru_cache
def tokenizer_of(name: str) -> Any:
    """A byte tokenizer with the family's template and special tokens."""
    family = FAMILIES[name]
    made = byte_tokenizer(4096)
    special = [AddedToken(t, special=True, rstrip=t in family.strips) for t in family.special]
    made.add_special_tokens({"additional_special_tokens": special})
    made.add_tokens(list(family.plain))
    made.bos_token = family.special[0]
    made.eos_token = family.eos
    made.pad_token = family.eos
    made.chat_template = family.template
    return made
