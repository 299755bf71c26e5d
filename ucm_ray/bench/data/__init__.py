"""The texts of the benchmarks: documents, the system prompt, and the prompts built from them.

Everything here is deterministic: the same tokenizer gives the same token ids on every machine.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
SEPARATOR = "\n---\n"
ASK = "Question: {question} Answer in full sentences, with the details that the document gives."


class Question(NamedTuple):
    question: str
    answer: str


@dataclass(frozen=True)
class Document:
    """One document of about 260 tokens of English prose, with two questions that it answers."""

    id: str
    title: str
    text: str
    questions: tuple[Question, ...]

    @property
    def stored_text(self) -> str:
        """The text as prompts contain it: with the line that ends it."""
        return self.text + SEPARATOR


@dataclass(frozen=True)
class Prompt:
    """A chat prompt: system message, documents, question.

    `document_spans[i]` is the range of `token_ids` that holds document i with its separator; `question_start` is the
    position of the first token after the last document.
    """

    name: str
    document_ids: tuple[str, ...]
    question: Question
    token_ids: tuple[int, ...]
    document_spans: tuple[tuple[int, int], ...]

    @property
    def question_start(self) -> int:
        return self.document_spans[-1][1]


@cache
def load_documents() -> tuple[Document, ...]:
    with open(FOLDER / "documents.jsonl", encoding="utf-8") as lines:
        return tuple(_document(json.loads(line)) for line in lines)


def _document(raw: dict[str, Any]) -> Document:
    questions = tuple(Question(item["q"], item["a"]) for item in raw["questions"])
    return Document(raw["id"], raw["title"], raw["text"], questions)


@cache
def load_system_prompt() -> str:
    return (FOLDER / "system_prompt.txt").read_text(encoding="utf-8").strip()


def evaluation_prompts(tokenizer: Any, count: int = 16, documents_per_prompt: int = 12) -> list[Prompt]:
    """Prompts that quality is reported on; each asks the first question of a document of its own."""
    return _shuffled_prompts(tokenizer, "evaluation", count, documents_per_prompt, question_index=0)


def held_out_prompts(tokenizer: Any, count: int = 8, documents_per_prompt: int = 12) -> list[Prompt]:
    """Prompts with other shuffles and the documents' second questions, for checking choices made on the others."""
    return _shuffled_prompts(tokenizer, "held-out", count, documents_per_prompt, question_index=1)


def _shuffled_prompts(tokenizer: Any, kind: str, count: int, per_prompt: int, question_index: int) -> list[Prompt]:
    """Deal the shuffled documents into prompts, again and again; no document is asked about twice before all were."""
    documents = load_documents()
    if not 1 <= per_prompt <= len(documents):
        raise ValueError(f"documents_per_prompt: found {per_prompt}, expected 1 to {len(documents)}")
    # seeding with a string hashes it with SHA-512: the same on every machine, whatever PYTHONHASHSEED is
    shuffle = random.Random(f"ucm-ray {kind} prompts")
    prompts: list[Prompt] = []
    asked: set[str] = set()
    deck: list[Document] = []
    while len(prompts) < count:
        if len(deck) < per_prompt:
            deck = list(documents)
            shuffle.shuffle(deck)
        hand, deck = deck[:per_prompt], deck[per_prompt:]
        fresh = [document for document in hand if document.id not in asked] or hand
        subject = shuffle.choice(fresh)
        asked.add(subject.id)
        name = f"{kind}-{len(prompts):02d}"
        prompts.append(build_prompt(tokenizer, name, hand, subject.questions[question_index]))
    return prompts


def build_prompt(tokenizer: Any, name: str, documents: list[Document], question: Question) -> Prompt:
    """Token ids of the chat `system, documents + question`, assembled piece by piece.

    Every document ends with a line of its own, so no token crosses a border: the pieces' tokens are the whole text's.
    """
    head, tail = _chat_frame(tokenizer)
    token_ids = list(tokenizer.encode(head, add_special_tokens=False))
    spans = []
    for document in documents:
        start = len(token_ids)
        token_ids += tokenizer.encode(document.stored_text, add_special_tokens=False)
        spans.append((start, len(token_ids)))
    token_ids += tokenizer.encode(ASK.format(question=question.question) + tail, add_special_tokens=False)
    ids = tuple(document.id for document in documents)
    return Prompt(name, ids, question, tuple(token_ids), tuple(spans))


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after the user's text."""
    placeholder = "[user text]"
    messages = [{"role": "system", "content": load_system_prompt()}, {"role": "user", "content": placeholder}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, tail = chat.split(placeholder)
    return head, tail
